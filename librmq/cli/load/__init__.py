"""Operations applied to a store from lines of JSON."""

from librmq.cli.load.operations import run

__all__ = ["run"]
