"""Append, dispatch, read and query an open store."""
