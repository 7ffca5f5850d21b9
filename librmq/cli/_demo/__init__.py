"""Demos whose code is shown as it runs: the story of a shop, and a producer that is killed."""

from librmq.cli._demo._kill import prove_by_kills
from librmq.cli._demo._shop import PAGE, tell_shop
from librmq.cli._demo._stage import Program, Screen, demo_folder, replace_folder

__all__ = ["PAGE", "Program", "Screen", "demo_folder", "prove_by_kills", "replace_folder", "tell_shop"]
