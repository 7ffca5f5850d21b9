"""The files of a store, byte by byte, and their places."""
