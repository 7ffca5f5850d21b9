"""A store in an object store or a distributed file system, read through a local mirror that is filled as needed.

::

    s3://bucket/store/commitlog/00…    a sparse file of the same length; the blocks that a read needs are fetched
                      consumequeue/…   copied up to the empty rest of each file
                      index/…          the headers
                      config/…, …      copied

Only a store that was closed tells where its log ends: by librmq's note, or by the queues after a broker's clean
shutdown. Any other store is copied whole, because a reader must look at its records as recovery would.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from librmq.columns.options import ReadOptions, RemoteLog
from librmq.config import ENTRY_SIZE
from librmq.errors import ConfigError, CorruptionError, MissingExtraError, NotAStoreError, StoreIOError
from librmq.files import DiskFiles, Files
from librmq.files.interface import make_folders
from librmq.files.rolling import file_name
from librmq.override import override
from librmq.runtime.event_log import advance
from librmq.store.format import directory
from librmq.store.format.documents import OWN_FOLDER

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://).")
_BLOCK: Final = 64 << 10
_REQUEST_BYTES: Final = 8 << 20
_AT_ONCE_BYTES: Final = 32 << 20
_INDEX_HEADER: Final = 40
_AFTER_END: Final = 4096
_SALVAGED: Final = (f"{OWN_FOLDER}/salvage",)
_NOT_READ: Final = (directory.TIMERLOG, directory.TIMERWHEEL, *_SALVAGED)
_BY_PYARROW: Final = {
    "s3": "S3FileSystem",
    "s3a": "S3FileSystem",
    "gs": "GcsFileSystem",
    "abfs": "AzureFileSystem",
    "abfss": "AzureFileSystem",
    "hdfs": "HadoopFileSystem",
}
"""Schemes that PyArrow reads too, where fsspec's package for them is not installed."""

_Range = tuple[str, int, int]
_Ints = npt.NDArray[np.int64]


class RemoteStore:
    """A store behind a URL, such as ``s3://bucket/store``, and the parts of it that were fetched. Read only.

    Fetched parts stay in a temporary folder until the object is gone, so repeated reads fetch them once. All reads see
    the store as it was at the first one; no writer may change it meanwhile. Not thread-safe.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Nothing is fetched before the first read.

        Args:
            url: The URL of the store's folder, of a scheme that fsspec knows.
            storage_options: Arguments of the scheme's file system, such as keys and endpoints.

        Raises:
            ConfigError: ``url`` is no URL, or ``storage_options`` are no mapping by names.
        """
        text: Any = url
        if not isinstance(text, str) or not _URL.match(text):
            raise ConfigError(f"url: expected a URL such as s3://bucket/store, found {text!r:.80}")
        check_storage_options(storage_options)
        self.url: str = url.rstrip("/")
        self.storage_options: dict[str, Any] = dict(storage_options or {})
        """Arguments of the scheme's file system."""
        self._is_kept = True
        self._is_whole = False
        self._folder: str | None = None
        self._within: str | None = None
        self._system: Any = None
        self._root = ""
        self._sizes: dict[str, int] = {}
        self._blocks: dict[str, set[int]] = {}
        self.fetched_bytes: int = 0
        """Number of bytes that were fetched."""
        self.requests: int = 0
        """Number of ranges that were fetched."""

    @classmethod
    def once(cls, url: str, storage_options: Mapping[str, Any] | None) -> Self:
        """Name a store for one read, which drops what it has read."""
        self = cls(url, storage_options)
        self._is_kept = False
        return self

    @classmethod
    def whole(cls, url: str, storage_options: Mapping[str, Any] | None) -> Self:
        """Name a store of which the first use copies every file, for readers of any part of it."""
        self = cls(url, storage_options)
        self._is_whole = True
        return self

    @classmethod
    def of_log(cls, log: RemoteLog) -> Self:
        """Name a store of which another process has planned the read: only its log is fetched, and dropped."""
        self = cls.once(log.url, log.storage_options)
        self._sizes = dict(log.sizes)
        self._within = log.folder
        return self

    @override
    def __repr__(self) -> str:
        return f"<RemoteStore {self.url}, {self.fetched_bytes} bytes fetched>"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.url, self.storage_options)

    @property
    def path(self) -> str:
        """The folder of the mirror, which the first use makes."""
        if self._folder is None:
            system, root = _file_system(self.url, self.storage_options)
            self._system, self._root = system, root.rstrip("/")
            within = self._within if self._within and os.path.isdir(self._within) else None
            mirror = tempfile.mkdtemp(prefix="librmq-remote-", dir=within)
            weakref.finalize(self, shutil.rmtree, mirror, ignore_errors=True)
            # Lists of several stores name each by the end of its path.
            folder = os.path.join(mirror, *_folders(self.url))
            os.makedirs(folder)
            if self._sizes:
                self._blocks = {name: set() for name in self._sizes}
                make_folders(DiskFiles(), os.path.join(folder, directory.COMMITLOG))
                for name, size in self._sizes.items():
                    _make_sparse(os.path.join(folder, name), size)
            else:
                self._mirror(folder)
            self._folder = folder
        return self._folder

    @property
    def log(self) -> RemoteLog:
        """The store's log, for a process that reads a part of it."""
        from fsspec.implementations.memory import MemoryFileSystem

        if isinstance(self._system, MemoryFileSystem):
            raise ConfigError(f"{self.url}: memory:// is in this process only")
        sizes = {name: size for name, size in self._sizes.items() if _below(name, directory.COMMITLOG)}
        # Processes that are killed at the end of a read leave files, which go with this mirror.
        return RemoteLog(self.url, self.storage_options, sizes, os.path.dirname(self.path))

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the blocks with these bytes of a log file that were not fetched yet."""
        self._fetch({name: ranges})

    def fetch_at(self, places: Iterable[int], size: int) -> None:
        """Fetch the blocks with ``size`` bytes at each of these physical offsets that were not fetched yet, at once."""
        at = np.fromiter(places, np.int64)
        self._fetch_records(at, np.full(len(at), size))

    def _fetch_records(self, places: _Ints, sizes: _Ints) -> None:
        """Fetch the blocks with these records that were not fetched yet, at once; neighbours are joined before."""
        places, sizes = places[places >= 0], sizes[places >= 0]
        if not self._blocks or not len(places):
            return
        file_size = next(self._sizes[name] for name in self._blocks)
        ends, starts = places + sizes, places // file_size * file_size
        apart = (places[1:] != ends[:-1]) | (starts[1:] != starts[:-1])
        firsts, lasts = np.append(True, apart), np.append(apart, True)
        by_file: dict[str, list[tuple[int, int]]] = {}
        runs = zip(starts[firsts].tolist(), places[firsts].tolist(), ends[lasts].tolist(), strict=True)
        for start, begin, end in runs:
            by_file.setdefault(f"{directory.COMMITLOG}/{file_name(start)}", []).append((begin - start, end - start))
        self._fetch(by_file)

    def _fetch(self, by_file: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        missing: list[_Range] = []
        fetched: list[tuple[set[int], set[int]]] = []
        for name, ranges in by_file.items():
            have = self._blocks.get(name)
            if have is None:
                continue
            size = self._sizes[name]
            blocks = {block for first, end in ranges for block in range(first // _BLOCK, -(-min(end, size) // _BLOCK))}
            if blocks := blocks - have:
                numbers = np.array(sorted(blocks))
                firsts = numbers[np.diff(numbers, prepend=-2) > 1] * _BLOCK
                lasts = numbers[np.diff(numbers, append=numbers[-1] + 2) > 1] * _BLOCK + _BLOCK
                missing += ((name, a, min(b, size)) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True))
                fetched.append((have, blocks))
        if missing:
            self._copy(self.path, missing)
            for have, blocks in fetched:
                have |= blocks

    def release_space(self) -> None:
        """Give back the space of the log, unless repeated reads can use it."""
        for name, have in self._blocks.items():
            if have and not self._is_kept:
                path = os.path.join(self.path, name)
                os.unlink(path)  # mappings of it stay valid
                _make_sparse(path, self._sizes[name])
                have.clear()

    # ------------------------------------------------------------------------------------------------------ the mirror

    def _mirror(self, path: str) -> None:
        listed = dict(self._files())
        if not listed:
            raise NotAStoreError(f"{self.url}: there is nothing here; expected the folder of a store")
        _check_is_store(self.url, listed)
        self._sizes = listed
        by_part: dict[str, list[str]] = {}
        skipped = _SALVAGED if self._is_whole else _NOT_READ
        for name, size in listed.items():
            place = os.path.join(path, name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            _make_sparse(place, size)
            if not any(_below(name, folder) for folder in skipped):
                by_part.setdefault(name.partition("/")[0], []).append(name)
        if self._is_whole:
            names = [name for part in by_part.values() for name in part]
            advance(0, sum(listed[name] for name in names))
            self._copy(path, self._whole(names))
            return
        logs, index = by_part.pop(directory.COMMITLOG, []), by_part.pop(directory.INDEX, [])
        queues = by_part.pop(directory.CONSUMEQUEUE, [])
        if directory.recognise(path, DiskFiles()).derives_queues:
            for name in (directory.CONSUMEQUEUE_ROCKSDB, directory.BATCHCONSUMEQUEUE):
                by_part.pop(name, None)
            self._copy(path, self._whole(name for names in (*by_part.values(), logs) for name in names))
            return
        self._copy(path, self._whole(name for names in by_part.values() for name in names))
        is_closed = directory.ABORT not in listed
        if is_closed:
            self._copy(path, ((name, 0, min(_INDEX_HEADER, listed[name])) for name in index))
            self._copy_used(path, queues)
        knows_end = is_closed and (self._fetch_end(path, logs) or self._note_end(path, logs))
        if knows_end and not _needs_log(path):
            self._blocks |= {name: set() for name in logs}
        else:
            self._copy(path, self._whole([*queues, *index, *logs]))

    def _files(self) -> Iterator[tuple[str, int]]:
        try:
            listed = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreIOError("list", self.url, error) from error
        prefix = self._root.lstrip("/") + "/"
        for path, about in listed.items():
            name = path.lstrip("/").removeprefix(prefix)
            if about.get("type") != "file" or name.endswith("/") or name == directory.LOCK:
                continue
            if os.path.normpath(name) != name or name.startswith(("/", "..")) or "\0" in name:
                raise NotAStoreError(f"{self.url}: {name!r:.80} is no name of a store's file")
            yield name, int(about["size"])

    def _whole(self, names: Iterable[str]) -> Iterator[_Range]:
        return ((name, 0, self._sizes[name]) for name in names)

    def _fetch_end(self, path: str, logs: list[str]) -> bool:
        """Fetch the last record, and return whether the log ends where librmq says that it closed it."""
        from librmq.commitlog import CommitLog  # a process that only reads parts does not load the store
        from librmq.store.engine.saved_state import read_closed_state

        files = DiskFiles()
        closed = read_closed_state(path, files)
        if closed is None or not logs:
            return False
        size = self._sizes[logs[0]]
        begin = closed.log_end if closed.last_record is None else closed.last_record
        ends = []
        for name in logs:
            start = int(name.rpartition("/")[2])
            first, last = max(begin - start, 0), min(closed.log_end + _BLOCK - start, self._sizes[name])
            ends += [(name, first, last)] if first < last else []
        self._copy(path, ends)
        log = CommitLog.open(
            os.path.join(path, directory.COMMITLOG),
            size,
            files=files,
            writable=False,
            scan_from=lambda _: closed.log_end,
        )
        return closed.agrees_with(log)

    def _note_end(self, path: str, logs: list[str]) -> bool:
        """Note where a broker closed the log, as librmq does at a close; return whether it is known.

        A broker leaves no note of it. After a clean shutdown the queues have an entry of each record, so the log ends
        with the record of the last entry, if nothing follows it.
        """
        from librmq.consumequeue import ConsumeQueue
        from librmq.store.engine.saved_state import write_closed_state
        from librmq.store.engine.store_parts import PartFiles, QueueTable

        files = DiskFiles()
        try:
            config = directory.infer_config(path, files)

            def open_queue(topic: str, queue_id: int) -> ConsumeQueue:
                folder = directory.queue_folder(path, topic, queue_id)
                return ConsumeQueue.open(folder, config.consumequeue_file_size, files=files, writable=False)

            queues = QueueTable(open_queue, dict.fromkeys(directory.list_queues(path, files)))
            last = [
                queue.entry(queue.max_offset - 1) for queue in queues.values() if queue.max_offset > queue.min_offset
            ]
            spans = [(entry.physical_offset, entry.size) for entry in last if entry is not None]
            if not spans:
                return False
            place, size = max(spans)
            ranges = []
            for name in logs:
                start, length = int(name.rpartition("/")[2]), self._sizes[name]
                begin, end = max(place - start, 0), min(max(place + size - start, 0) + _AFTER_END, length)
                if start + length > place and begin < end:
                    ranges.append((name, begin, end))
            self._copy(path, ranges)
            part_files = PartFiles(path, config, files)
            log = part_files.open_log(scan_from=lambda _: place)
            if log.last_write != place or log.found_end.damage is not None:
                return False
            write_closed_state(path, files, log, queues, part_files.open_index())
        except CorruptionError:
            return False  # a reader of the whole copy reports what is wrong
        return True

    def _copy_used(self, path: str, names: Iterable[str]) -> None:
        """Copy files of queue entries up to the first block that ends with an empty entry."""
        at, step = dict.fromkeys(names, 0), 512 * ENTRY_SIZE
        while at:
            ranges = [(name, begin, min(begin + step, self._sizes[name])) for name, begin in at.items()]
            self._copy(path, ranges)
            at, step = {}, step * 4
            for name, _, end in ranges:
                with open(os.path.join(path, name), "rb") as file:
                    last = os.pread(file.fileno(), ENTRY_SIZE, end - ENTRY_SIZE)
                if end < self._sizes[name] and last.strip(b"\0"):
                    at[name] = end

    def _copy(self, path: str, ranges: Iterable[_Range]) -> None:
        """Fetch ranges into the mirror, some at a time."""
        pieces = [
            (name, at, min(at + _REQUEST_BYTES, end))
            for name, begin, end in ranges
            for at in range(begin, end, _REQUEST_BYTES)
        ]
        while pieces:
            sizes = np.cumsum([end - begin for _, begin, end in pieces])
            count = max(1, int(np.searchsorted(sizes, _AT_ONCE_BYTES, "right")))
            self._copy_pieces(path, pieces[:count])
            pieces = pieces[count:]

    def _copy_pieces(self, path: str, pieces: list[_Range]) -> None:
        names = [f"{self._root}/{name}" for name, _, _ in pieces]
        begins, ends = [begin for _, begin, _ in pieces], [end for _, _, end in pieces]
        try:
            blocks = self._system.cat_ranges(names, begins, ends, on_error="raise")
        except OSError as error:
            raise StoreIOError("read", self.url, error) from error
        for (name, begin, end), data in zip(pieces, blocks, strict=True):
            if len(data) != end - begin:
                url = f"{self.url}/{name}"
                raise CorruptionError(url, begin, "size", f"expected {end - begin} bytes, found {len(data)}")
            try:
                with open(os.path.join(path, name), "r+b") as file:
                    file.seek(begin)
                    file.write(data)
            except OSError as error:
                raise StoreIOError("write the local copy (TMPDIR names another disk)", path, error) from error
            advance(len(data))
            self.fetched_bytes += len(data)
            self.requests += 1


class RemoteFiles(DiskFiles):
    """The disk with the mirrors of remote stores, which are fetched as they are read."""

    def __init__(self, stores: Mapping[str, RemoteStore]) -> None:
        """Take the stores by their URLs."""
        super().__init__()
        self._stores = stores
        self._mirrors: dict[str, RemoteStore] = {}

    def mirrored(self, options: ReadOptions) -> ReadOptions:
        """Return options with the paths of mirrors instead of URLs."""
        return replace(options, paths=tuple(map(self.mirror, options.paths)))

    def mirror(self, path: str) -> str:
        """Return the folder of the mirror if ``path`` is a URL, else ``path``."""
        if path in self._stores:
            store = self._stores[path]
            path = store.path
            self._mirrors[path] = store
        return path

    def store(self, path: str) -> RemoteStore | None:
        """Return the store that is mirrored in ``path``."""
        return self._mirrors.get(path)


def remote_store(files: Files, path: str) -> RemoteStore | None:
    """Return the store that is mirrored in ``path``; None if it is there itself."""
    return files.store(path) if isinstance(files, RemoteFiles) else None


def check_storage_options(storage_options: object) -> None:
    """Raise `ConfigError` for arguments of a file system that are no mapping by names."""
    if storage_options is not None and not (
        isinstance(storage_options, Mapping) and all(isinstance(name, str) for name in storage_options)
    ):
        raise ConfigError(f"storage_options: expected values by names of arguments, found {storage_options!r:.80}")


def located(text: str, storage_options: Mapping[str, Any] | None) -> str | RemoteStore:
    """Return the local path that ``text`` names, or the store behind its URL.

    Raises:
        ConfigError: The scheme can't be read.
    """
    if "\0" in text:
        raise ConfigError(f"store: expected a path or a URL, found {text!r:.80}, which has a null character")
    parts = urlsplit(text)
    scheme = parts.scheme
    if scheme == "file" and not parts.netloc:
        return os.path.abspath(unquote(parts.path))
    if scheme != "dbfs" and _URL.match(text):
        return RemoteStore.once(text, storage_options)
    if len(scheme) > 1 and not os.path.lexists(text):  # one letter is a drive
        raise ConfigError(
            f"store: {text!r:.80}: expected a path or a URL such as s3://bucket/store, found the scheme {scheme}: "
            "write the path where it is mounted, such as /dbfs/…, or ./ before a relative path"
        )
    return os.path.abspath(text)


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        return _opened(url, options)
    except OSError as error:
        reason = OSError(str(error).partition("\n")[0])  # the JVM's loader tells many lines
        raise StoreIOError("open the file system", url, reason) from error


def _opened(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    scheme, _, location = url.partition("://")
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(f"reading {scheme}://", "remote") from error
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        if scheme not in _BY_PYARROW:
            raise ConfigError(f"store: {url}: a package is missing that reads {scheme}://: {error}") from error
        return _by_pyarrow(scheme, location, options)
    except ValueError as error:
        schemes = ", ".join(f"{name}://" for name in (*_BY_PYARROW, "memory"))
        raise ConfigError(f"store: {url}: expected a scheme that fsspec knows, such as {schemes}: {error}") from error
    return system, str(path)


def _by_pyarrow(scheme: str, path: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    from pyarrow import fs

    if scheme in ("s3", "s3a") and "endpoint_override" not in options:  # PyArrow does not read the variable
        endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", ""))
        if endpoint.netloc:
            options = {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc, **options}
    try:
        return _ArrowSystem(getattr(fs, _BY_PYARROW[scheme])(**options)), path
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"storage_options: PyArrow can't open {scheme}:// with them: {error}") from error


class _ArrowSystem:
    """A file system of PyArrow with the two calls of fsspec that a mirror needs."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        from pyarrow.fs import FileSelector

        entries = self._system.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
        return {entry.path: {"type": "file" if entry.is_file else "folder", "size": entry.size} for entry in entries}

    def cat_ranges(self, paths: list[str], begins: list[int], ends: list[int], *, on_error: str) -> list[bytes]:
        blocks = []
        for path, begin, end in zip(paths, begins, ends, strict=True):
            with self._system.open_input_file(path) as file:
                blocks.append(file.read_at(end - begin, begin))
        return blocks


def _needs_log(path: str) -> bool:
    """Return whether a reader makes damaged files again, for which it reads the whole log."""
    from librmq.store import MessageStore  # as in `_fetch_end`

    try:
        with MessageStore.open(path, read_only=True) as store:
            return bool(store.condition.derived)
    except CorruptionError:
        return True


def _folders(url: str) -> list[str]:
    """Return names of folders for the mirror of a store: those of the URL."""
    names = url.rpartition("://")[2].split("/")
    return [name[:200] for name in names if name not in ("", ".", "..")][-4:] or ["store"]


def _check_is_store(url: str, names: Iterable[str]) -> None:
    """Refuse a folder above stores, which can be of any size.

    Raises:
        NotAStoreError: There is no log, but there are logs below.
    """
    logs = {head for head, middle, _ in (f"/{name}".partition(f"/{directory.COMMITLOG}/") for name in names) if middle}
    if logs and "" not in logs:
        stores = ", ".join(url + log for log in sorted(logs)[:5])
        raise NotAStoreError(f"{url}: no store, but {len(logs)} are below it ({stores}): name one of them")


def _make_sparse(path: str, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def _below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + "/")
