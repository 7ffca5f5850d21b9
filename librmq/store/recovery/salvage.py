"""Salvage: copies of everything that recovery cuts, and the records after damage.

::

    librmq/salvage/00000000000000088235-1700000000000/      one cut: its physical offset, and when it was made (ms)
        manifest.json                                       version, and the fields of `KeptCut`
        00000000000000088235                                the bytes of the log from this physical offset on
        00000000000000131072                                the same from the next file of the log

A cut is copied and flushed before the log loses a byte; whole files are linked if the file system can. A broker
ignores the folder, and it can be deleted at any time. Of cuts without a sound record, as a crash leaves them, the
newest eight are kept. Other cuts stay until you delete them.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from librmq.commitlog import CommitLog
from librmq.consumequeue_entries import entry_dtype
from librmq.errors import CorruptionError, RecordError, StoreError, StoreIOError
from librmq.files import Advice, Buffer, DiskFiles, File, Files
from librmq.files.interface import copy_file, link_file, numbered_files
from librmq.files.rolling import MappedFileQueue, file_name
from librmq.message import StoredMessage, frames, record
from librmq.message.properties import PropertyName
from librmq.runtime import lazy_numpy as np
from librmq.runtime.event_log import advance
from librmq.store.engine.derivation import COMPARED, DerivedBlock, KeyBlock, block_of_file
from librmq.store.format.directory import COMMITLOG, check_kind
from librmq.store.format.documents import OWN_FOLDER, read_document, write_document

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANIFEST: Final = "manifest.json"
_PART: Final = ".part"  # a cut has it while it is copied
_WITHOUT_RECORDS_KEPT: Final = 8
_CUT_NAME: Final = re.compile(r"(\d{20})-(\d{1,19})")
_MANIFEST_KINDS: Final = {"bytes": (int, NoneType), "records": (int, NoneType), "why": (str, NoneType)}

_LONG: Final = struct.Struct(">q")
_MAGICS: Final = tuple(magic.to_bytes(4, "big") for magic in record.MAGICS)
_ANY_MAGIC: Final = re.compile(b"|".join(map(re.escape, _MAGICS)))


class Gap(NamedTuple):
    """Bytes of the log, or of a kept cut, that do not form a sound record."""

    physical_offset: int
    """Place of the first byte."""
    size: int
    """Bytes."""
    file: str
    """The file of the gap, or the folder of the log for bytes in no file."""
    what: str
    """What is wrong with the bytes."""


@dataclass(frozen=True, slots=True)
class KeptCut:
    """A kept cut: ``size`` bytes from ``physical_offset`` on; None for fields that its manifest lacks."""

    path: str
    physical_offset: int
    cut_timestamp_ms: int
    size: int | None
    records: int | None
    """Number of sound records in it."""
    why: str


_UNIQUE: Final = PropertyName.UNIQUE_KEY.encode() + b"\1"


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Sound records of the log that are usual for `derived_block`, side by side in memory."""

    data: bytes
    sizes: NDArray[np.int64]
    """Bytes of each record."""
    derived: DerivedBlock
    """What they define, at their places in the log."""

    @classmethod
    def of_file(cls, buffer: Buffer, start: int, place: int, end: int) -> Self | None:
        """Return usual sound records between two places of a file; None if the first ones are unusual."""
        derived = block_of_file(buffer, start, place, end, COMPARED, check_body=True)
        if derived is None:
            return None
        sizes = np.diff(derived.keys.physical_offsets, append=derived.end)
        return cls(buffer[place : derived.end - start], sizes, derived)

    def messages(self) -> list[StoredMessage]:
        """Return the records one by one."""
        return [StoredMessage(raw) for _, _, raw in frames.split(self.data, 0) if raw is not None]

    def count_keys(self) -> int:
        """Return how many keys the records have, and an id for each record."""
        count, keys = len(self.sizes), len(self.derived.keys.key_hashes)
        if not keys:
            return count
        if self.data.count(_UNIQUE) == count:
            return keys
        return sum(1 + len(message.keys) for message in self.messages())

    def at(self, places: NDArray[np.int64]) -> Self | None:
        """Return those of the records that are at ``places``, which ascend; None without one."""
        record_places, queues = self.derived.keys.physical_offsets, list[tuple[bytes, int, int, bytes]]()
        places = places[np.searchsorted(places, record_places[0]) : np.searchsorted(places, record_places[-1], "right")]
        rows, is_chosen = np.searchsorted(record_places, places), np.zeros(len(record_places), np.bool_)
        is_chosen[rows[record_places[rows] == places]] = True
        if is_chosen.all():
            return self
        if not is_chosen.any():
            return None
        for topic, queue_id, queue_offset, raw in self.derived.queues:
            entries = np.frombuffer(raw, entry_dtype())
            entries = entries[is_chosen[np.searchsorted(record_places, entries["physical_offset"].astype(np.int64))]]
            if len(entries):
                queues.append((topic, queue_id, queue_offset, entries.tobytes()))
        keys, ends = self.derived.keys, np.cumsum(self.sizes)
        of_chosen = is_chosen[keys.record_of_key]
        block = KeyBlock(
            record_places[is_chosen],
            keys.timestamps[is_chosen],
            (np.cumsum(is_chosen) - 1)[keys.record_of_key[of_chosen]],
            keys.key_hashes[of_chosen],
        )
        parts = zip((ends - self.sizes)[is_chosen].tolist(), ends[is_chosen].tolist(), strict=True)
        data = b"".join([self.data[begin:end] for begin, end in parts])
        return type(self)(data, self.sizes[is_chosen], DerivedBlock(self.derived.end, queues, block))


# ------------------------------------------------------------------------------------------------------- finding


def find_record(
    sequence: MappedFileQueue, begin: int, end: int | None = None, *, check_body: bool = True
) -> int | None:
    """Return the place of the first sound record from ``begin`` to ``end`` that names its own place.

    This costs one search for four bytes through the range.
    """
    end = sequence.end if end is None else end
    at = begin
    while at < end and (file := sequence.file_at(at)) is not None:
        start = at - at % file.size
        until = min(end - start, file.data_end())
        place = _find(file.buffer, at - start, file.size, start, until, check_body=check_body)
        if place is not None:
            return start + place
        at = start + file.size
    return None


def _find(
    buffer: Buffer, begin: int, end: int, start: int, until: int | None = None, *, check_body: bool = True
) -> int | None:
    """Search one buffer whose first byte is at ``start``, for a record that begins before ``until``."""
    until = end if until is None else min(end, until)
    for match in _ANY_MAGIC.finditer(buffer, begin + record.MAGIC_AT, min(end, until + record.MAGIC_AT + 3)):
        place = match.start() - record.MAGIC_AT
        if place + record.FIXED_SIZE > end or place >= until:
            return None
        if _LONG.unpack_from(buffer, place + record.PHYSICAL_OFFSET_AT)[0] != start + place:
            continue
        with contextlib.suppress(RecordError):
            if record.check_record(buffer, place, end, check_body=check_body):
                return place
    return None


_MOST_HELD: Final = 32 << 20
"""Bytes of a file whose pages a read holds at most."""
_WORTH_BLOCK: Final = 64
"""Number of usual records from which a block takes less time than one after the other."""
_LEAST_APART: Final = 256
_MOST_APART: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Source:
    """A file with bytes of the log, ``size`` of them from physical offset ``start`` on."""

    path: str
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size

    def parts(self, file: File) -> Iterator[tuple[int, int, RecordBlock | bytes | str]]:
        """Yield what `items` does, and many usual records together."""
        end, place, min_items = min(file.data_end(), self.size), 0, _LEAST_APART
        while place < end:
            block = RecordBlock.of_file(file.buffer, self.start, place, end)
            if block is not None and len(block.sizes) >= _WORTH_BLOCK:
                advance(len(block.data))
                yield place, len(block.data), block
                place, min_items = place + len(block.data), _LEAST_APART
                continue
            count = 0
            for at, size, item in islice(self.items(file, place), min_items):
                yield at, size, item
                place, count = at + size, count + 1
            if count < min_items:
                return
            min_items = min(2 * min_items, _MOST_APART)

    def items(self, file: File, place: int = 0) -> Iterator[tuple[int, int, bytes | str]]:
        """Yield place, size and bytes of each record, and of each other stretch its description.

        Holes of the file are not read.
        """
        buffer, data_end, used = file.buffer, min(file.data_end(), self.size), -1
        while place < data_end:
            what = None
            try:
                for at, size, raw in frames.items(
                    buffer, self.path, self.start, place, data_end, self.size, True, data_end
                ):
                    place = at - self.start
                    if raw is None:  # the blank that ends a file
                        break
                    yield place, size, raw
                    place += size
                else:
                    return
            except CorruptionError as error:
                place, what = error.offset - self.start, error.what
            if used < 0:
                used = file.used_end(place, self.size)
            following = _find(buffer, place + 1, self.size, self.start, used)
            if what is not None:
                end = max(place, used) if following is None else following
                if end > place:
                    yield place, end - place, what
            if following is None:
                return
            place = following


def salvaged_records(path: str, files: Files | None = None) -> Iterator[StoredMessage | Gap]:
    """Yield every sound record of the store in ``path``, and the gaps between them.

    The log's records come first, in physical order, whatever is damaged or missing there. Those of each kept cut
    follow, the oldest cut first, without records that the log or an older cut has at the same place. In a sound record
    all lengths agree and the body matches its checksum; after damage it must also name its own place. A record between
    sound ones that names another place is returned with the right one.

    This takes no lock and changes nothing.

    Raises:
        NotAStoreError: There is no store.
    """
    files = files or DiskFiles()
    check_kind(path, files)
    for part in chain(log_parts(path, files, in_blocks=False), cut_records(path, files)):
        if isinstance(part, RecordBlock):
            yield from part.messages()
        else:
            yield part


LogPart = RecordBlock | StoredMessage | Gap
"""A part of a log: many sound records, one, or bytes that form none."""


def log_parts(path: str, files: Files, *, in_blocks: bool = True) -> Iterator[LogPart]:
    """Yield the part of `salvaged_records` that the log holds; with ``in_blocks`` many usual records together."""
    end: int | None = None
    sources = _sources(os.path.join(path, COMMITLOG), files)
    in_blocks = in_blocks and not any(source.end > following.start for source, following in pairwise(sources))
    for source in sources:
        if end is not None and source.start > end:
            yield Gap(end, source.start - end, os.path.dirname(source.path), "these bytes are in no log file")
        end = source.end
        yield from _read(source, [], files, in_blocks=in_blocks)


def cut_records(path: str, files: Files) -> Iterator[LogPart]:
    """Yield the part of `salvaged_records` that only cuts hold."""
    earlier = _sources(os.path.join(path, COMMITLOG), files)
    for cut in kept_cuts(path, files):
        sources = _sources(cut.path, files)
        for source in sources:
            yield from _read(source, earlier, files)
        earlier = earlier + sources


def _sources(folder: str, files: Files) -> list[_Source]:
    return [
        _Source(os.path.join(folder, entry.name), int(entry.name), entry.size)
        for entry in numbered_files(files, folder)
        if len(entry.name) == 20 and entry.size
    ]


def _read(source: _Source, earlier: list[_Source], files: Files, *, in_blocks: bool = False) -> Iterator[LogPart]:
    """Yield the content of a file that no earlier one has at the same place."""
    if source.end >= 1 << 63:
        yield Gap(source.start, source.size, source.path, "expected a start whose file ends below 2^63")
        return
    try:
        file = files.open(source.path)
    except (StoreIOError, CorruptionError) as error:
        yield Gap(source.start, source.size, source.path, str(error))
        return
    others = [
        (other, files.open(other.path)) for other in earlier if other.start < source.end and source.start < other.end
    ]
    data_ends, released = [other.data_end() for _, other in others], 0
    for place, size, item in source.parts(file) if in_blocks else source.items(file):
        if place - released > _MOST_HELD:
            file.advise(released, place, Advice.NO_USE)
            released = place
        physical_offset = source.start + place
        if others:
            raw = file.buffer[place : place + size]
            if any(
                (at := physical_offset - holder.start) < data_end and other.buffer[at : at + size] == raw
                for (holder, other), data_end in zip(others, data_ends, strict=True)
            ):
                continue
        if isinstance(item, RecordBlock):
            yield item
        else:
            yield (
                Gap(physical_offset, size, source.path, item)
                if isinstance(item, str)
                else _message_at(physical_offset, item)
            )


def _message_at(physical_offset: int, raw: bytes) -> StoredMessage:
    """Return the message of a record, which may name another place than its own."""
    address, at = _LONG.pack(physical_offset), record.PHYSICAL_OFFSET_AT
    return StoredMessage(raw if raw[at : at + 8] == address else raw[:at] + address + raw[at + 8 :])


# ------------------------------------------------------------------------------------------------------- keeping


def kept_cuts(path: str, files: Files | None = None) -> list[KeptCut]:
    """Return the kept cuts of the store in ``path``, the oldest first."""
    files = files or DiskFiles()
    folder = os.path.join(path, OWN_FOLDER, "salvage")
    cuts = []
    for entry in files.list(folder):
        named = _CUT_NAME.fullmatch(entry.name)
        if named is None or not named[0].isascii() or not entry.is_folder:
            continue
        place = os.path.join(folder, entry.name)
        manifest: dict[str, Any] = {}
        with contextlib.suppress(StoreError):  # an unreadable one has no fields
            manifest = read_document(os.path.join(place, MANIFEST), files, _MANIFEST_KINDS) or {}
        size, count, why = (manifest.get(name) for name in _MANIFEST_KINDS)
        cuts.append(KeptCut(place, int(named[1]), int(named[2]), size, count, why or ""))
    return sorted(cuts, key=lambda cut: (cut.cut_timestamp_ms, cut.physical_offset))


def keep_cut(path: str, log: CommitLog, physical_offset: int, size: int, why: str, files: Files, now_ms: int) -> str:
    """Keep the ``size`` bytes of the log from ``physical_offset`` on before a cut, and return their folder.

    They are on the device when it returns.

    Raises:
        StoreIOError: For example, the disk is full; nothing is kept.
    """
    parent = os.path.join(path, OWN_FOLDER, "salvage")
    files.make_folder(parent)
    files.flush_folder(os.path.dirname(parent))
    files.flush_folder(path)
    names = {entry.name for entry in files.list(parent)}
    for name in names:
        if name.endswith(_PART):  # a process died while it wrote this file
            files.delete(os.path.join(parent, name))
    while (name := f"{physical_offset:020d}-{now_ms}") in names:
        now_ms += 1
    folder = os.path.join(parent, name)
    part = folder + _PART
    try:
        files.make_folder(part)
        count = _copy(log, physical_offset, part, files)
        manifest = {
            "physical_offset": physical_offset,
            "bytes": size,
            "why": why[:1000],
            "cut_timestamp_ms": now_ms,
            "records": count,
        }
        # Write this file last, because that flushes the names of the others too.
        write_document(os.path.join(part, MANIFEST), files, manifest, indent=1)
        files.rename(part, folder)
        files.flush_folder(parent)
    except BaseException:
        with contextlib.suppress(StoreError):
            files.delete(part)
        raise
    empty_cuts = [cut for cut in kept_cuts(path, files) if cut.records == 0]
    for cut in empty_cuts[:-_WITHOUT_RECORDS_KEPT]:
        files.delete(cut.path)
    return folder


def _copy(log: CommitLog, physical_offset: int, folder: str, files: Files) -> int:
    """Copy the bytes from ``physical_offset`` on, and return the number of sound records in them."""
    sequence, count = log.sequence, 0
    for start in sequence.starts:
        begin = max(physical_offset, start)
        if begin >= start + log.file_size:
            continue
        file = sequence.file(start)
        end = sequence.used_end(start, begin - start)
        if end <= begin - start:
            continue
        target = os.path.join(folder, file_name(begin))
        if begin == start > physical_offset and link_file(files, file.path, target):
            files.flush(file)
        else:
            # Keep the full length, because the last record can end in zeros; zeros take no blocks.
            copy_file(files, file, target, begin=begin - start, end=end, size=start + log.file_size - begin)
        source = _Source(target, begin, start + log.file_size - begin)
        count += sum(isinstance(item, bytes) for _, _, item in source.items(files.open(target)))
    return count
