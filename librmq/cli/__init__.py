"""The command line: one module for each group of commands, loaded at its first use. Its face is `main`."""

from librmq.cli._main import main

__all__ = ["main"]
