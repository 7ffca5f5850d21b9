"""Deletion of expired files, and copies of a store in use."""
