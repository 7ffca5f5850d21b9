"""Plans of reads whose parts other processes read, wherever the stores are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from librmq.columns.options import ReadOptions
from librmq.columns.parts import Part, slice_entries
from librmq.columns.planner import PARTITION_BYTES, PlannedStore, Ranges, plan
from librmq.columns.remote import RemoteFiles
from librmq.files.seam import Files


def plan_for_others(
    options: ReadOptions,
    files: Files | None = None,
    *,
    bytes_a_part: int = PARTITION_BYTES,
    prune: Callable[[PlannedStore, Ranges, ReadOptions], Ranges] | None = None,
) -> list[Part]:
    """Plan a read as `plan` does, in parts that need no mirror of this process."""
    if not isinstance(files, RemoteFiles):
        return plan(options, files, bytes_a_part=bytes_a_part, prune=prune)
    parts = plan(files.mirrored(options), files, bytes_a_part=bytes_a_part, prune=prune)
    return [_portable(part, files) for part in parts]


def _portable(part: Part, files: RemoteFiles) -> Part:
    """Return a part of a remote store with its entries and the place of the log; others stay as they are."""
    store = files.store(part.path)
    if store is None:
        return part
    slices = []
    for share in part.slices:
        entries = b"".join(block.tobytes() for _, block in slice_entries(part, share, files, []))
        slices.append(replace(share, inline_from=share.begin, inline=entries))
    return replace(part, path=store.url, slices=tuple(slices), remote=store.log)
