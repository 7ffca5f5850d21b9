"""``demo``: a shop at work, with the code of each step, and a producer that is killed."""

from __future__ import annotations

import argparse
import os
import secrets
import sys

from librmq.cli._demo import PAGE, Screen, demo_folder, prove_by_kills, tell_shop
from librmq.cli._output import DAMAGED, Output
from librmq.errors import InputError


def demo(arguments: argparse.Namespace, _: Output) -> int:
    """Show the steps; the status is 1 if something is lost."""
    if arguments.seed is not None and arguments.what != "kill":
        raise InputError("--seed: it draws when a producer is killed, so it is for librmq demo kill")
    screen, keep = Screen(sys.stdout), arguments.keep
    with demo_folder(keep) as folder:
        if arguments.what == "kill":
            seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
            is_whole = prove_by_kills(screen, folder, seed)
        else:
            page = PAGE if keep is None else f"librmq console {os.path.join(keep, 'shop')}"
            is_whole = tell_shop(screen, folder, page)
    return 0 if is_whole else DAMAGED
