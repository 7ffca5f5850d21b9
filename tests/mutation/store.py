"""Leave out every flush of a store, and every check of its recovery, one at a time, and see that a crash tells.

From the root of the checkout: ``python -m tests.mutation.store [word …]`` (only mutants whose name holds a word).
Flushes are found in the code: each call of `FLUSHES` that is a statement, and each mark by which a flush knows what it
has to take along. Checks are listed by what stands there. Each is left out in a copy of ``librmq``, in which images of
crashes are then checked until one fails, or the tests are run that are named for it. Prints killed of all; status 1
where one lives. Takes half an hour.
"""

# ruff: noqa: E501 (a check a line)

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.reference import CHECKOUT

IMAGES = 3_000
"""So many images may a mutant survive."""
MODULES = (
    "appending",
    "checkpoint",
    "closedstate",
    "commitlog",
    "consumequeue",
    "consumequeueext",
    "dispatch",
    "files",
    "flushing",
    "housekeeping",
    "indexfile",
    "keyindex",
    "mappedfile",
    "opening",
    "recovery",
    "retention",
    "salvage",
    "snapshot",
    "store",
)
FLUSHES = (
    "flush",
    "fsync",
    "flush_folder",
    "_flush_folder",
    "_flush_folders",
    "reach",
    "mark_dirty",
    "mark_found",
    "lower",
)
NAMES = ("_flush_folders", "flush", "flush_all", "make_folders")
"""Functions that flush."""
MARKS = ("_dirty", "_folder_dirty", "_changed_folders", "unflushed")


class Mutant(NamedTuple):
    """One thing left out: in ``module``, the characters from ``begin`` to ``end`` read ``after``."""

    name: str
    module: str
    begin: int
    end: int
    after: str
    tests: str | None = None
    """The files of tests that should tell, if not images of crashes."""


def mutants() -> list[Mutant]:
    found = [mutant for module in MODULES for mutant in _flushes(module)]
    return found + [_check(*check) for check in CHECKS]


def _source(module: str) -> str:
    return (CHECKOUT / "librmq" / f"{module}.py").read_text("utf-8")


def _flushes(module: str) -> Iterator[Mutant]:
    source = _source(module)
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(line: int, column: int) -> int:  # columns count bytes
        text = source[lines[line - 1] : lines[line]]
        return lines[line - 1] + len(text.encode()[:column].decode())

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in _statements(function):
            if _is_flush(node):
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
                text = " ".join(source[begin:end].split())
                name = f"{module}.{function.name}: {text}"
                tests = next((tests for begins, tests in TOLD_BY.items() if name.startswith(begins)), None)
                yield Mutant(name, module, begin, end, "pass", tests)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, not those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _is_flush(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute):
            on = called.value
            adds = called.attr in ("add", "update") and isinstance(on, ast.Attribute) and on.attr in MARKS
            return called.attr in FLUSHES or adds
        return isinstance(called, ast.Name) and called.id in NAMES
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        is_true = isinstance(node.value, ast.Constant) and node.value.value is True
        return is_true and node.targets[0].attr in MARKS
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr in MARKS


def _check(name: str, module: str, before: str, after: str, tests: str | None = None) -> Mutant:
    source = _source(module)
    if source.count(before) != 1:
        raise SystemExit(f"{name}: {before!r} stands {source.count(before)} times in {module}")
    begin = source.index(before)
    return Mutant(f"{module}: {name}", module, begin, begin + len(before), after, tests)


# fmt: off
UNIT = "tests/unit/test_{}.py".format
CRASH = "tests/crash/test_{}.py".format
TOLD_BY = {
    "files.": CRASH("disk_flushes"),
    "dispatch.write_entries": CRASH("settled"),
    "checkpoint.forget_index": CRASH("settled"),
    "opening._delete": CRASH("settled"),
    "flushing.flush": CRASH("settled"),
    "flushing.wait": UNIT("flushing"),
    "housekeeping.": UNIT("housekeeping"),
    "store.clean_unused_topics": UNIT("unused_topics"),
    "salvage.": CRASH("copies"),
    "snapshot.": CRASH("copies"),
    # A store has flushed its parts before it closes them, and before it expires anything; parts in use alone do it then.
    "consumequeue.append:": CRASH("parts"),
    "consumequeue.close": CRASH("parts"),
    "consumequeueext.close": CRASH("parts"),
    "indexfile.close": CRASH("parts"),
    "keyindex.close": CRASH("parts"),
    "retention._flush:": UNIT("retention"),
    # Where the next write to the file would mostly be flushed in time.
    "commitlog.patch": CRASH("parts"),
    "indexfile.create": CRASH("parts"),
    "indexfile._take_back": CRASH("parts"),
    "indexfile.write_again": CRASH("parts"),
    "keyindex._delete": CRASH("parts"),
    "mappedfile.zero_from": CRASH("parts"),
    "mappedfile.delete_before": CRASH("parts"),
    "recovery._set_checkpoint: queue.flush": CRASH("settled"),
    "recovery._set_checkpoint: self._parts.index.flush": CRASH("settled"),
    "recovery._write_again": CRASH("settled"),
    "retention._delete": CRASH("settled"),
    "retention._flush_folder": CRASH("settled"),
    "retention._follow": CRASH("settled"),
    "store.close: queue.flush": CRASH("settled"),
    # What a flush that failed left out stays to be flushed.
    "mappedfile.flush: self._dirty.add": UNIT("mappedfile"),
    "mappedfile._flush_folders: self._changed_folders |=": UNIT("mappedfile"),
    "indexfile.flush: self._dirty = True": UNIT("indexfile"),
    "keyindex.flush: self._folder_dirty = True": CRASH("parts"),
    "store._flush_derived: dispatcher.unflushed |=": CRASH("settled"),
    "store._flush_derived: flush_all": CRASH("settled"),
    # The one that was there vouches for less, or for what was cut.
    "recovery._set_checkpoint: checkpoint.flush": UNIT("recovery"),
}
"""What tells of a flush that is left out, by the begin of its name, if not images of crashes."""

CHECKS: Sequence[tuple[str, str, str, str] | tuple[str, str, str, str, str]] = (
    # --- where to begin
    ("an exit was unclean", "opening", "    clean = not has_abort(files, path)\n", "    clean = True\n"),
    ("the checkpoint tells where to begin", "opening", "return log.third_last_file() if clean else vouched_for(log, checkpoint)", "return log.third_last_file()"),
    ("records of one moment", "checkpoint", "_MARGIN_MS: Final = 3000", "_MARGIN_MS: Final = 0"),
    ("both log and queues are vouched for", "checkpoint", "min(self.physic_timestamp_ms, self.logics_timestamp_ms) - _MARGIN_MS", "max(self.physic_timestamp_ms, self.logics_timestamp_ms) - _MARGIN_MS", UNIT("checkpoint")),
    ("the closed state is of this log", "opening", "closed is not None and closed.agrees_with(log)", "closed is not None", UNIT("closedstate")),
    ("the closed state is of a log that begins there", "closedstate", "log.begin != self.log_begin or ", "", UNIT("closedstate")),
    ("the closed state is of a log that ends there", "closedstate", " or log.data_at(self.log_end, 8).strip(b\"\\0\")", "", UNIT("closedstate")),
    ("the closed state is of a log that ends with this record", "closedstate", "return zlib.crc32(log.data_at(self.last_record, self.log_end - self.last_record)) == self.last_record_crc32", "return True", UNIT("closedstate")),
    ("the checkpoint forgets the index before it is removed", "opening", "        forget=checkpoint.forget_index,\n", "", CRASH("settled")),
    ("the checkpoint forgets the index before it is made again", "recovery", "                        forget_index=parts.checkpoint.forget_index,\n", "", CRASH("settled")),
    ("an empty index file says what its first entry would", "indexcheck", "file.header.index_count <= 1 and file.header != before.header.follower", "False", UNIT("recovery")),
    ("a queue from which a file was deleted", "recovery", "            above.update(filter(self._files.is_folder, folders))  # from which files may have been deleted\n", "", CRASH("settled")),
    ("queues that went since", "opening", "trusted.queues.keys() != set(names) or ", "", UNIT("closedstate")),
    ("index files that went since", "opening", " or not trusted.has_index(index)", "", UNIT("closedstate")),
    ("a queue is as it was closed", "closedstate", "if (queue.max_offset, queue.max_physic_offset) != state[1:]:", "if False:", UNIT("closedstate")),
    # --- where the log ends
    ("bodies", "commitlog", "self._items(buffer, start, at - start, self.file_size, True)", "self._items(buffer, start, at - start, self.file_size, False)"),
    ("torn properties", "recovery", "if what is None and unvouched is not None and _is_torn(", "if False and _is_torn("),
    ("zeros to the end of a sector", "recovery", "        if not any(padded[at : at + _SECTOR]) and (at == properties_at or padded[at - 1]):\n            return True\n", "        pass\n"),
    ("a word that was written last", "recovery", "return properties_at <= written < size and not (place + written) % _WORD", "return False"),
    ("topics of torn records", "recovery", "what = nameless = _names_no_queue(raw, known)", "what = nameless = None", UNIT("salvage")),
    ("what an open store has is not torn", "recovery", "if not self._living and self._explained_by_crash(", "if self._explained_by_crash(", UNIT("recovery")),
    ("a store that is refused is left as it was", "recovery", "        if not self._thorough:\n            self._check_cut(end, cut)\n            if", "        if not self._thorough:\n            if", UNIT("salvage")),
    ("a store that is refused later is left as it was", "recovery", "                self._check_walk(end.physical_offset)\n", "                pass\n", UNIT("salvage")),
    ("a store that is refused is as clean as before", "opening", "            if clean:  # refused after all", "            if False:  # refused after all", UNIT("recovery")),
    ("a crash may leave sound records behind a hole", "recovery", "return not self._clean and not vouched_for and _may_be_unwritten(log, at, following)", "return False"),
    ("what an exit vouched for is not cut", "recovery", "return not self._clean and not vouched_for and _may_be_unwritten(log, at, following)", "return True", UNIT("salvage")),
    ("what the checkpoint vouched for is not cut", "recovery", "return not self._clean and not vouched_for and _may", "return not self._clean and _may", UNIT("salvage")),
    ("what is no hole is not cut", "recovery", "not vouched_for and _may_be_unwritten(log, at, following)", "not vouched_for", UNIT("salvage")),
    ("a size begins with zeros", "recovery", "end - start + 3, log.file_size", "end - start, log.file_size"),
    ("a blank may be torn", "recovery", "return blank.startswith(buffer[at : log.file_size]", "return b'' == (buffer[at : log.file_size]", UNIT("recovery")),
    ("after a clean exit a damage is cut", "recovery", "            end.damage is not None\n            or not self._clean\n", "            not self._clean\n", UNIT("recovery")),
    ("after a clean exit queues tell of more", "recovery", "            or any(queue.max_physic_offset > at for queue in parts.queues.values())\n", "", UNIT("recovery")),
    ("after a clean exit later files tell of more", "recovery", "            or any(any(log.sequence.file(start).buffer[:8]) for start in log.sequence.starts if start > at)\n", "", UNIT("recovery")),
    ("the log is cut", "recovery", "        elif cut or log.sequence.end > end.physical_offset + log.file_size:\n", "        elif False:\n"),
    ("files behind the log's end go", "recovery", "        elif cut or log.sequence.end > end.physical_offset + log.file_size:\n", "        elif cut:\n", UNIT("recovery")),
    ("what is cut is kept", "recovery", "                salvage.keep(self._path, log, end.physical_offset, cut, why, self._files, self._clock.now_ms())\n", "                pass\n", CRASH("copies")),
    # --- the index
    ("index files that nobody vouched for", "recovery", 'self._drop_index(self._unvouched_index(), "the checkpoint")', "pass"),
    ("index files that are not full", "recovery", "if not file.full or end > limit:", "if end > limit:", UNIT("recovery")),
    ("index files beyond the checkpoint", "recovery", "if not file.full or end > limit:", "if not file.full:", UNIT("recovery")),
    ("index files of one moment", "recovery", "            if end == limit:\n                return files[number + 1 :]\n", "", UNIT("recovery")),
    ("the index goes on where it ends", "recovery", "            begin = min(begin, index.end_physical_offset)\n        ahead", "        ahead"),
    ("index files ahead of the log", "recovery", "ahead = [file for file in index.files if file.header.end_physical_offset >= log.end]", "ahead = []", UNIT("recovery")),
    ("an index header may be torn", "opening", "        mend if clean or not writable else cuts,\n", "        mend,\n"),
    ("an index that lost its first files", "indexcheck", "self.sound = not (self._none and self._end > begin)", "self.sound = True", UNIT("reconcile")),
    ("an index file that is not full", "indexcheck", "            if not file.full:\n", "            if False:\n", UNIT("reconcile")),
    ("an index that is no index", "indexcheck", "            if found is not None:\n                self.sound = False\n", "            if found is not None:\n", UNIT("reconcile")),
    ("keys that differ", "indexcheck", "if run is not None or not there or there != expected[: len(there)]:", "if False:", UNIT("verify")),
    ("times that differ", "indexcheck", "        if run.seconds != times:\n", "        if False:\n", UNIT("verify")),
    ("an index that lacks the last records", "indexcheck", "if physical_offset > self._end or self._none:", "if False:"),
    # --- queues
    ("queues are looked at in any case", "recovery", "if begin < parts.log.end or self._thorough or not self._clean:", "if begin < parts.log.end or self._thorough:"),
    ("queues that lack older entries", "recovery", "            except GapError:\n                begin = parts.log.begin\n                continue\n", "            except ZeroDivisionError:\n                continue\n", UNIT("recovery")),
    ("queues that were lost", "recovery", "            if _lacks_entries(log, parts.queues):\n", "            if False:\n", UNIT("recovery")),
    ("queues that were lost since the store was closed", "recovery", "if self._thorough or self._lost:", "if self._thorough:", UNIT("closedstate")),
    ("queues ahead of the log", "recovery", "        if queue.max_physic_offset > parts.log.end:\n", "        if False:\n", UNIT("recovery")),
    ("queues serve what the log has", "recovery", "        queue.serve_from(parts.log.begin)\n\n    def _reconcile_from", "\n    def _reconcile_from", UNIT("recovery")),
    ("entries that differ", "queuecheck", "if same < len(entries):", "if False:"),
    ("entries that no record leads to", "queuecheck", "                queue.truncate_to(self._next)\n", "                pass\n", UNIT("reconcile")),
    ("entries of records that are gone", "queuecheck", "        if wrong is None:\n            return\n", "        return\n", UNIT("reconcile")),
    ("bytes behind the last entry", "queuecheck", "        elif not self._mend:\n            return\n", "        else:\n            return\n", UNIT("recovery")),
    ("bytes behind the last entry are cleared", "queuecheck", "                queue.recover()\n", "                pass\n"),
    ("zeros are no entry", "queuecheck", "raw[:12] == entry.packed[:12]", "raw[:8] == entry.packed[:8]", UNIT("reconcile")),
    ("units in order", "queuecheck", "and earlier >= code:", "and False:", UNIT("reconcile")),
    ("units of the record", "queuecheck", "return unit.tags_code in wanted and unit.store_timestamp_ms == entry.store_timestamp_ms", "return True", UNIT("reconcile")),
    ("units that are no units", "queuecheck", "        if unit is None or entry is None:\n            return False\n        return unit", "        if unit is None or entry is None:\n            return True\n        return unit"),
    ("a record's own address", "reconcile", "if address != physical_offset:", "if False:", UNIT("reconcile")),
    ("a record's queue offset", "queuecheck", "        if queue_offset != claimed:\n", "        if False:\n", UNIT("reconcile")),
    # --- files that a crash left
    ("log files of length zero", "opening", "    found = _empty_at_end(log, files)\n", "    found: list[str] = []\n", UNIT("recovery")),
    ("queue files beside missing ones", "opening", "found += _beside_missing(folder, files, 0 if ext else log_begin)", "pass"),
    ("queue files of several lengths", "opening", "    if len({size for _, size in found if size}) > 1:\n        return []  # no crash does that\n", "", UNIT("recovery")),
    ("queue files that were about to go", "opening", "if not (entry_size > 0 and place < log_begin):", "if True:", UNIT("recovery")),
    ("queue files without a last entry", "opening", "if not (entry_size > 0 and place < log_begin):", "if not place < log_begin:"),
    ("index files of length zero", "opening", "    found += reversed([name for name, _ in itertools.dropwhile(lambda file: file[1], _numbered(folder, files))])\n", ""),
    ("index files behind one of length zero", "opening", "reversed([name for name, _ in itertools.dropwhile(lambda file: file[1], _numbered(folder, files))])", "[name for name, size in _numbered(folder, files) if not size]", UNIT("recovery")),
    ("a checkpoint of length zero", "opening", "    if files.size(checkpoint) == 0:\n", "    if False:\n"),
    # --- what a recovery leaves
    ("what is found is flushed", "recovery", "        if not self._clean:\n            self._write_again()\n", ""),
    ("queues are written again", "recovery", "            if queue.max_physic_offset > begin:\n", "            if False:\n", CRASH("settled")),
    ("units are written again with those of no entry", "consumequeue", "self.ext.write_again(self._last_ext_address(queue_offset))", "self.ext.write_again(self._last_ext_address(queue_offset + 1))", CRASH("parts")),
    ("index files are written again", "recovery", "        if self._thorough:  # else those", "        if False:  # else those", CRASH("settled")),
    ("folders of queues are flushed", "recovery", "                    above |= {folder, os.path.dirname(folder)}\n", "                    pass\n", CRASH("settled")),
    ("the checkpoint after recovery", "recovery", "        if not self._clean or parts.cuts:\n            self._set_checkpoint(stored)\n", "", CRASH("settled")),
    ("a checkpoint that is later than the last record", "recovery", "        if max(times) > stored:\n", "        if False:\n", UNIT("recovery")),
    ("the marker while open", "opening", "        set_abort(files, path)  # only now", "        pass  # only now"),
    ("the marker while open, opened at once", "opening", "    if writable and trusted is not None:\n        set_abort(files, path)\n", "    if writable and trusted is not None:\n        pass\n"),
    # --- flushing
    ("a flush of a file", "files", "            (os.fdatasync if hasattr(os, \"fdatasync\") else os.fsync)(descriptor)\n", "            pass\n", CRASH("disk_flushes")),
    ("the flushed end is that before the flush", "commitlog", "        self._flushed = end\n        return end\n", "        self._flushed = end\n        return self.end\n"),
    ("a mark during a flush is kept", "mappedfile", "            self._dirty.discard(start)\n            try:\n                if start in self.starts:\n                    self._files.flush(self.file(start))\n", "            try:\n                if start in self.starts:\n                    self._files.flush(self.file(start))\n                self._dirty.discard(start)\n", UNIT("mappedfile")),
    ("the index vouched for is that before the flush", "store", "min(indexed, stored)", "min(index.full_timestamp_ms, stored)", CRASH("settled")),
    ("the log is flushed before its files go", "retention", "        end = self._log.flush()\n", "        end = self._log.end\n", UNIT("retention")),
    ("what is flushed goes, what is not stays", "retention", "            if end >= self._settled_upto:\n                break\n", "", UNIT("retention")),
    ("after a failed flush of queues nothing is vouched for", "store", "                if self._derived_failure is not None:\n", "                if False:\n", CRASH("settled")),
    ("after a failed flush of queues nothing is clean", "store", "                if self._derived_failure is None:\n", "                if True:\n", CRASH("settled")),
    ("after a failed flush of the log nothing is acknowledged", "flushing", "                self.failure = error\n", "                pass\n", CRASH("failing_calls")),
    ("after a failed flush of the log nothing is taken", "store", "    def _on_failed_flush(self) -> None:\n        self._accepts = False\n", "    def _on_failed_flush(self) -> None:\n        pass\n", CRASH("failing_calls")),
)
# fmt: on


def killer(mutant: Mutant, copy: Path, images: int) -> str | None:
    """What tells that ``mutant`` is in ``copy``, None if nothing does."""
    path = copy / "librmq" / f"{mutant.module}.py"
    original = path.read_text("utf-8")
    path.write_text(original[: mutant.begin] + mutant.after + original[mutant.end :], "utf-8")
    try:
        return _told(mutant.tests, copy, images)
    finally:
        path.write_text(original, "utf-8")


def _told(tests: str | None, copy: Path, images: int) -> str | None:
    """What images of crashes, or tests, tell of the ``librmq`` in ``copy``; None if it is sound by them."""
    hunt = ["tests.crash.runs", str(images)]
    if tests is not None:
        hunt = ["pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        while True:
            done = subprocess.run(
                [sys.executable, "-m", *hunt],
                cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False,
            )  # fmt: skip
            if done.returncode >= 0:  # else it was ended from outside
                break
    except subprocess.TimeoutExpired:
        return "it did not come to an end"
    if not done.returncode:
        return None
    lines = (done.stdout + done.stderr).splitlines()
    return next((line for line in lines if line.startswith(("after ", "FAILED ", "ERROR tests"))), "?")


def alive(chosen: Sequence[Mutant], images: int = IMAGES) -> list[Mutant]:
    """Those that survive so many images."""
    found = []
    with tempfile.TemporaryDirectory(prefix="librmq-mutation-") as folder:
        copy = Path(folder)
        for file in ("pyproject.toml", "pytest_librmq.py"):
            shutil.copy(CHECKOUT / file, copy)
        for part in ("librmq", "tests"):
            shutil.copytree(CHECKOUT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for tests in sorted({mutant.tests for mutant in chosen if mutant.tests}):
            if told := _told(tests, copy, images):
                raise SystemExit(f"{tests} tells of nothing, since it fails with nothing left out: {told}")
        for mutant in chosen:
            told = killer(mutant, copy, images)
            if told is None:
                found.append(mutant)
            print(f"{mutant.name}: {'ALIVE' if told is None else told[:100]}", flush=True)
    return found


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    left = alive(chosen)
    print(f"{len(chosen) - len(left)} of {len(chosen)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
