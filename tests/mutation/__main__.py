"""Break the library in one place at a time, and check that a test fails.

From the root of the checkout::

    python -m tests.mutation store.recovery                  # 40 mutants of a room, drawn from --seed
    python -m tests.mutation --sample 200 log append recovery delivery transactions share
    python -m tests.mutation --list message                  # the planned mutants

Mutants are found in the syntax tree of each function, so they do not depend on how a line is written: a condition that
always or never holds, a comparison that is off by one or reversed, an ``and`` or ``or`` without one of its parts, or a
call that is left out. Each mutant is made in the memory of a fork, where the tests of its module run until one fails,
and then the simulation.

The command prints the mutants that survive; some of them change nothing visible. It exits with status 1 if fewer than
``--least`` percent are killed. It is not part of the test run: each mutant takes seconds, or a minute if it survives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy  # noqa: F401 (once for all trials)
import pytest

from tests.mutation.planted import plant_sources, simulate, simulate_shares
from tests.reference import CHECKOUT

PARTS = {
    "log": ("commitlog", "message.frames", "files._disk"),
    "append": ("store.engine._append", "store.engine._append_fields"),
    "recovery": (
        "store.recovery.open",
        "store.engine.saved_state",
        "store.recovery._log_end",
        "store.recovery._queue_check",
        "store.recovery._entry_check",
    ),
    "delivery": (
        "delay",
        "scheduling.timer",
        "broker.retries",
        "broker.handlers._receive",
        "broker.handlers._pull",
        "consumer._assignment",
        "consumer._failures",
        "consumer._retries",
        "consumer._orderly",
    ),
    "transactions": ("txn", "broker._transactions", "scheduling.half_messages"),
    "share": ("wire.share", "wire.share_links"),
}
"""What an acknowledged message depends on."""
_ENDS = (
    "test_txn.py",
    "scheduling/test_txn_machine.py",
    "broker/test_transactions.py",
    "crash/test_pending.py",
)
TESTS = {
    "commitlog": (
        *("test_commitlog.py", "store/test_recover.py", "store/test_store.py", "crash/test_full_disk.py"),
        "store/test_reader.py",
        *("store/test_append_block.py", "cluster/test_replica.py", "cli/test_damage_by_command.py"),
    ),
    "message.frames": ("test_commitlog.py", "message", "store/test_flipped_bytes.py", "store/test_recover.py"),
    "files._disk": (
        *("files", "crash/test_disk_flushes.py", "crash/test_parts.py", "store/test_directory.py"),
        *("store/test_salvage.py", "store/test_foreign_files.py", "wire/test_share.py"),
    ),
    "store.engine._append": (
        *(
            "store/test_append_block.py",
            "store/test_store.py",
            "store/test_durability.py",
            "store/test_group_commit.py",
        ),
        *(
            "store/test_store_machine.py",
            "store/test_live_handle.py",
            "store/test_interrupted.py",
            "broker/test_sending.py",
            "crash/test_full_disk.py",
        ),
    ),
    "store.recovery": (
        *("store/test_recover.py", "store/test_clean_shutdown.py", "store/test_reconcile.py", "crash/test_marks.py"),
        *(
            "store/test_foreign_files.py",
            "store/test_rescue.py",
            "store/test_deleted_topics.py",
            "crash/test_images.py",
        ),
        *("crash/test_parts.py", "store/test_verify.py", "crash/test_damage.py", "store/test_queues_in_memory.py"),
    ),
    "delay": ("test_delay.py", "scheduling/test_waiting.py", "crash/test_pending.py", "broker/test_broker_machine.py"),
    "scheduling.timer": ("scheduling/test_timer.py", "broker/test_timers.py", "broker/test_cancel.py"),
    "scheduling.half_messages": _ENDS,
    "txn": _ENDS,
    "broker._transactions": ("broker/test_transactions.py", "client/test_transactions.py", "broker/test_life.py"),
    "broker.retries": (
        *("broker/test_receives.py", "consumer/test_push.py", "broker/test_repeated_sends.py", "consumer"),
        *("broker/test_administered_routes.py", "cluster/test_cluster.py"),
    ),
    "broker.handlers._receive": (
        "broker/test_receives.py",
        "broker/test_receives_machine.py",
        "wire/test_connect_pop.py",
    ),
    "broker.handlers._pull": ("broker/test_pulling.py", "consumer/test_pull.py", "broker/test_retention.py"),
    "consumer": ("consumer/test_processqueue.py", "consumer/test_push.py", "consumer/test_orderly.py", "consumer"),
    "wire": ("wire/test_share.py", "wire/test_shared_settings.py"),
}
"""Tests that detect mutants, by module or room, the best first; without one here, the folder of the room's name."""
LEFT_OUT = "not slow and not spark"
SIMULATED_S = 8
"""Of computing, for the simulation of a mutant that the tests have not detected."""
MOST_SECONDS = 120
"""Of computing, after which a trial that does not end is ended; one that waits has four times as long."""
FAILED_TRIAL = 70
"""The status of a trial that has failed itself."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """A module that is broken in one place, with its changed source."""

    name: str
    module: Path
    source: Callable[[], str]


def modules(word: str) -> dict[str, Path]:
    """Return the modules of a part, of a room, or a single module, by their dotted names within librmq."""
    package = CHECKOUT / "librmq"
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}
    if word in PARTS:
        return {name: paths[name] for name in PARTS[word]}
    return {name: path for name, path in paths.items() if f"{name}.".startswith(f"{word}.")}


def mutants(word: str) -> Iterator[Mutant]:
    """Yield the mutants of a part, room or module."""
    for name, path in modules(word).items():
        yield from _of_module(path, name)


def _of_module(path: Path, module: str) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text("utf-8"))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for number, node in enumerate(_nodes(function)):
            for what, broken in _broken(node):
                name = f"{module}.{function.name} {number}: {what}: {' '.join(ast.unparse(node).split())[:90]}"
                yield Mutant(name, path, partial(_source, tree, function, node, broken))


def _source(tree: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef, node: ast.AST, broken: ast.AST) -> str:
    """Return the source of a module in which one node of a function is another one."""
    swap, body = _Swap(node, broken), function.body
    function.body = [cast("ast.stmt", swap.visit(statement)) for statement in body]
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    finally:
        function.body = body


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, except those of nested functions, which are visited separately."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _broken(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield possible replacements of a node, with their descriptions."""
    if isinstance(node, ast.If | ast.IfExp):
        for value in (True, False):
            yield f"always {value}", _with(node, test=ast.Constant(value))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield "turned", _with(node, ops=[TURNED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            values = [value for number, value in enumerate(node.values) if number != left_out]
            yield f"without part {left_out}", _with(node, values=values) if len(values) > 1 else values[0]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "left out", ast.Pass()
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        yield "turned", _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class _Swap(ast.NodeTransformer):
    """Copy the path to one node, and put another node in its place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return self.new
        changed = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(changed, name, [self.visit(one) if isinstance(one, ast.AST) else one for one in value])
            elif isinstance(value, ast.AST):
                setattr(changed, name, self.visit(value))
        return changed


class Trial:
    """The tests of a mutant, in a fork of this process, which has not imported librmq."""

    def __init__(self, mutant: Mutant, output: Path) -> None:
        self.mutant, self._output = mutant, output
        self._begin = time.monotonic()  # noqa: TID251 (of the trial itself)
        sys.stdout.flush()
        self.process = os.fork()
        if self.process:
            return
        status = FAILED_TRIAL
        try:
            os.setsid()
            with output.open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
            status = self._run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _run(self) -> int:
        module = self.mutant.name.partition(" ")[0].rpartition(".")[0]
        plant_sources({f"librmq.{module}": (self.mutant.module, self.mutant.source())})
        words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", LEFT_OUT]
        status = int(pytest.main([*words, *(f"tests/{name}" for name in tests_of(module))]))
        if not status:
            lines = (simulate_shares if module in PARTS["share"] else simulate)(SIMULATED_S)[1]
            print("FAILED", *lines[:1]) if lines else None
            status = bool(lines)
        return status

    def ended(self) -> str | None:
        """Return why the mutant counts as killed once the tests have ended, "" if it survives; None while they run."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        if not process:
            if time.monotonic() - self._begin < 4 * MOST_SECONDS:  # noqa: TID251
                return None
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            return "it hangs"
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # what its tests have left
        code = os.waitstatus_to_exitcode(status)
        lines = self._output.read_text("utf-8", "replace").splitlines()
        if code in (FAILED_TRIAL, pytest.ExitCode.USAGE_ERROR):
            raise RuntimeError("\n".join(lines))
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0][:200] if failed else f"it ends by {code}: {' '.join(lines[-2:])[:200]}"


def tests_of(module: str) -> tuple[str, ...]:
    """Return the tests that detect mutants of a module."""
    names = [name for name in TESTS if f"{module}.".startswith(f"{name}.")]
    return TESTS[max(names, key=len)] if names else (module.partition(".")[0],)


def main(arguments: list[str]) -> int:
    """Make mutants, and print those that survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="See that tests notice mistakes.")
    parser.add_argument("words", nargs="+", metavar="part", help=f"{', '.join(PARTS)}; a room or module of librmq")
    parser.add_argument("--sample", type=int, default=40, help="this many at random, as many of each part; 0: all")
    parser.add_argument("--seed", default="0", help="of the sample")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones of the sample, which were made")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--least", type=int, default=80, help="status 1 if fewer percent are killed")
    parser.add_argument("--list", action="store_true", help="print the mutants, and make none")
    options = parser.parse_args(arguments)
    sample = _sample(options.words, options.sample, options.seed)[options.skip :]
    if not sample:
        parser.error(f"no module of librmq is called {' '.join(options.words)}")
    if options.list:
        print("\n".join(mutant.name for mutant in sample))
        return 0
    killed = _make(sample, options.jobs)
    print(f"{killed} of {len(sample)} killed")
    return 0 if 100 * killed >= options.least * len(sample) else 1


def _sample(words: Sequence[str], wanted: int, seed: str) -> list[Mutant]:
    """Return as many mutants of each word, drawn from the seed, one of each word after the other."""
    drawn = []
    for number, word in enumerate(words):
        found = list(mutants(word))
        count = (wanted + len(words) - 1 - number) // len(words) if wanted else len(found)
        drawn.append(random.Random(f"{seed} {word}").sample(found, min(count, len(found))))
    return [row[place] for place in range(max(map(len, drawn), default=0)) for row in drawn if place < len(row)]


def _make(sample: Sequence[Mutant], jobs: int) -> int:
    """Make the mutants, some at a time; return how many are killed."""
    killed = number = 0
    waiting, trials = list(reversed(sample)), list[Trial]()
    with tempfile.TemporaryDirectory(prefix="librmq-mutation-") as scratch:
        while waiting or trials:
            if waiting and len(trials) < jobs:
                trials.append(Trial(waiting.pop(), Path(scratch, str(len(waiting)))))
                continue
            for trial in list(trials):
                why = trial.ended()
                if why is not None:
                    trials.remove(trial)
                    number, killed = number + 1, killed + bool(why)
                    verdict = "killed" if why else "LIVES"
                    print(f"{number} {verdict}: {trial.mutant.name}  {why}", flush=True)
            time.sleep(0.05)  # noqa: TID251
    return killed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
