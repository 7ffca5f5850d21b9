"""Java's arithmetic, hashes and JSON, exactly.

Its face is `lang`, which has what Java's classes of numbers and texts do, and `json`, the form of a broker's files.
"""
