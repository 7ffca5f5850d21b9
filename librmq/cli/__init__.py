"""The command line: one module for each group of commands, loaded when one of them is asked for."""

from librmq.cli.main import main

__all__ = ["main"]
