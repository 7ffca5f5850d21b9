"""Run steps and user code: by threads, by hand, or in a background thread."""
