"""Reference data: files and answers recorded from RocketMQ, and where to find them.

The complete data are a folder ``golden``: the one that ``LIBRMQ_GOLDEN`` names, else ``../shared/golden`` next to the
checkout. If neither exists, the compact part in ``tests/data`` is used, unpacked to the same layout, so that a fresh
clone also tests the formats against real bytes. Its ``README.md`` lists its contents.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

CHECKOUT = Path(__file__).resolve().parent.parent
COMPACT = CHECKOUT / "tests" / "data"
NEIGHBOUR = CHECKOUT.parent / "shared" / "golden"
ABSENT = "reference data: "
"""The reason of a skip begins with this if the available reference data lack a file or folder."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The folder of reference data in use, and which of the three possible folders it is."""

    folder: Path
    origin: str
    whole: bool
    """Whether this is the folder next to the checkout, which has everything that tests need."""


@cache
def reference() -> Reference:
    """Return the reference data in use; unpack the compact part on the first call if it is needed."""
    named = os.environ.get("LIBRMQ_GOLDEN")
    if named:
        folder = Path(named).absolute()
        if not folder.is_dir():
            raise pytest.UsageError(f"LIBRMQ_GOLDEN names no folder: {folder}")
        return Reference(folder, f"{folder} (LIBRMQ_GOLDEN)", whole=False)
    if NEIGHBOUR.is_dir():
        return Reference(NEIGHBOUR, str(NEIGHBOUR), whole=True)
    folder = Path(tempfile.mkdtemp(prefix="librmq-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack_compact(COMPACT, folder)
    return Reference(
        folder, "tests/data (there is no ../shared/golden, and LIBRMQ_GOLDEN names no folder)", whole=False
    )


def unpack_compact(compact: Path, into: Path) -> None:
    """Unpack the compact part into the layout of the complete data."""
    for source in sorted([*compact.glob("**/*.json"), *compact.glob("**/*.jsonl")]):
        copy = into / source.relative_to(compact)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    for source in sorted(compact.glob("*.tar.xz")):
        unpack(source, into)


def unpack(archive: Path, into: Path) -> None:
    """Unpack the files of an archive into a folder."""
    with tarfile.open(archive, "r:xz") as packed:
        for member in filter(tarfile.TarInfo.isfile, packed):
            content = packed.extractfile(member)
            assert content is not None
            copy = into / member.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content.read())


def existing(*parts: str) -> Path:
    """Return a file or folder of the reference data; skip the test, visibly, if the available data lack it."""
    path = reference().folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{ABSENT}no {'/'.join(parts)} in {reference().origin}")
    return path


def folders(prefix: str, *, with_part: str = "") -> list[ParameterSet]:
    """Return every folder with this prefix as test parameters, or one skipped parameter if there are none.

    With ``with_part`` only folders that hold a file or folder of that name count.
    """
    found = sorted(path for path in reference().folder.glob(f"{prefix}*") if (path / with_part).is_dir())
    if not found:
        reason = f"{ABSENT}no {prefix}* in {reference().origin}"
        return [pytest.param(None, id=f"no-{prefix}", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(path, id=path.name) for path in found]


def store_folders() -> list[ParameterSet]:
    """Return every folder ``store-*`` for ``@pytest.mark.parametrize("folder", store_folders())``.

    Each holds ``store/``, ``expected.jsonl``, ``ops.jsonl`` and ``put_results.jsonl``.
    """
    return folders("store-", with_part="store")  # others hold archives


@cache
def jsonl(path: Path) -> tuple[Row, ...]:
    """Return all rows of a file of JSON lines, read once. They are shared: do not change them."""
    return tuple(json.loads(line) for line in path.read_text("utf-8").splitlines() if line)


@cache
def document(path: Path) -> Any:
    """Return the content of a JSON file, read once. It is shared: do not change it."""
    return json.loads(path.read_text("utf-8"))


@cache
def rows(folder: Path, row_type: str) -> tuple[Row, ...]:
    """Return the rows of one ``type`` from a folder's ``expected.jsonl``. They are shared: do not change them."""
    return tuple(row for row in jsonl(folder / "expected.jsonl") if row["type"] == row_type)


def encoding(section: str) -> Any:
    """Return a section of ``encoding.json``: a list of input and output pairs, or a table."""
    return document(existing("encoding.json"))[section]
