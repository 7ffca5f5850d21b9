"""Operations applied to a store from lines of JSON."""

from librmq.load.operations import run

__all__ = ["run"]
