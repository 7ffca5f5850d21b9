"""Each row of librmq's own clients at a broker while librmq has the fault that the row is there to find.

::

    python -m tests.judged.faults --namesrv HOST:9876 --store FOLDER    # the table: row, fault, outcome
    python -m tests.judged.faults --namesrv HOST:9876 --only "reset"    # rows with these words

A row that passes with its fault judges nothing: status 1. Rows that the broker can't run are left out. ``faults.toml``
has the faults, which are planted in a process of their own; no file is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.mutation.planted import PACKAGE, Edit, plant_sources

_AT_ONCE = 3
_CHECKOUT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A fault, and the row that has to find it."""

    row: str
    what: str
    edit: Edit


FAULTS = tuple(
    Fault(row.pop("row"), row.pop("what"), Edit(**row))
    for row in tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))["fault"]
)


def run_planted(fault: Fault, options: argparse.Namespace) -> None:
    """Plant a fault in this process, and print what becomes of its row, and the names that it made."""
    plant_sources({fault.edit.module: (PACKAGE / fault.edit.file, fault.edit.source())})
    from tests.judged.__main__ import Place, outcome, run_own

    place = Place.ask(options.namesrv, store=options.store, wait_s=options.wait)
    words = outcome(fault.row, place, partial(run_own, fault.row))
    print(json.dumps([words, sorted(place.made)]))


def outcome_with(fault: Fault, words: list[str]) -> tuple[str, list[str]]:
    """Run a row in a process with its fault; return what became of it, and the names that it made."""
    command = [sys.executable, "-m", "tests.judged.faults", *words, "--plant", fault.row]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*filter(None, sys.path), str(_CHECKOUT)))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{fault.row}: {done.stderr}")
    told, made = json.loads(done.stdout.splitlines()[-1])
    return told, made


def main(words: list[str]) -> int:
    """Print the table; return 0 if no row passes with its fault."""
    parser = argparse.ArgumentParser("python -m tests.judged.faults", description=__doc__)
    parser.add_argument("--namesrv", required=True, metavar="HOST:PORT", help="the broker's name server")
    parser.add_argument("--store", metavar="FOLDER", help="the broker's directory, to be read beside it")
    parser.add_argument("--wait", type=float, default=40, metavar="SECONDS", help="how long a row waits: 40")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows with these words")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.plant is not None:
        run_planted(next(fault for fault in FAULTS if fault.row == options.plant), options)
        return 0
    from tests.judged.__main__ import Place, cleaned

    wanted, blind = [fault for fault in FAULTS if options.only in fault.row], 0
    print("| row | fault | outcome |\n|---|---|---|")
    with cleaned(Place.ask(options.namesrv)) as place, ThreadPoolExecutor(_AT_ONCE) as pool:
        for fault, (told, made) in zip(wanted, pool.map(partial(outcome_with, words=words), wanted), strict=True):
            place.made.update(made)
            blind += told == "passed"
            print(f"| {fault.row} | {fault.what} | {told} |", flush=True)
    return 1 if blind else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
