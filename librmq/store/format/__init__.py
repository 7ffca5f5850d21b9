"""The files of a store, byte by byte, and where they lie."""
