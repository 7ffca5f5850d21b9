"""The command line: one module for each group of commands, loaded at its first use."""

from librmq.cli.main import main

__all__ = ["main"]
