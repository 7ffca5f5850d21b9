"""The command line: one module for each group of commands, loaded at its first use."""

from librmq.cli._main import main

__all__ = ["main"]
