"""Delete what has expired; copy a store in use."""
