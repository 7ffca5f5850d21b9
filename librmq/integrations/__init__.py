"""Interfaces of other projects to librmq, each over public names only."""
