"""Open segment files: shared by the loop, the writer and the workers, and not too many at once.

A `SegmentFile` closes its descriptor when nobody refers to it any more. So whoever still reads or writes
keeps it open just by holding it, also after the cache has dropped it or its name has been deleted, and nobody
has to give it back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from semel.disk import Buffer, Disk, File, write_fully

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
CLEANED_SUFFIX: Final = ".cleaned"
"""What a compaction is writing; of no value until it is renamed."""
SWAP_SUFFIX: Final = ".swap"
"""A finished compaction, named `<base>-<end>`, that replaces all segments of that range."""
OFFSET_DIGITS: Final = 20


def log_name(base_offset: int) -> str:
    return f"{base_offset:0{OFFSET_DIGITS}}{LOG_SUFFIX}"


def index_name(base_offset: int) -> str:
    return f"{base_offset:0{OFFSET_DIGITS}}{INDEX_SUFFIX}"


def cleaned_name(base_offset: int) -> str:
    return f"{base_offset:0{OFFSET_DIGITS}}{CLEANED_SUFFIX}"


def swap_name(base_offset: int, end_offset: int) -> str:
    return f"{base_offset:0{OFFSET_DIGITS}}-{end_offset:0{OFFSET_DIGITS}}{SWAP_SUFFIX}"


def offset_of(name: str) -> int:
    """The base offset that a name begins with."""
    return int(name[:OFFSET_DIGITS])


def offsets_of_swap(name: str) -> tuple[int, int]:
    base, end = name.removesuffix(SWAP_SUFFIX).split("-")
    return int(base), int(end)


class SegmentFile:
    """An open file that is closed with its last reference."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def __del__(self) -> None:
        self._file.close()

    @property
    def path(self) -> Path:
        return self._file.path

    def pread(self, size: int, offset: int) -> bytes:
        return self._file.pread(size, offset)

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        write_fully(self._file, buffers, offset)

    def fdatasync(self) -> None:
        self._file.fdatasync()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def fileno(self) -> int | None:
        return self._file.fileno()


class HasFile(Protocol):
    """What the cache needs to know of a segment."""

    file: SegmentFile | None

    @property
    def path(self) -> Path: ...


class OpenFiles:
    """The segment files that are open, the least recently used first. Any thread may ask."""

    def __init__(self, disk: Disk, limit: int) -> None:
        self._disk = disk
        self._limit = limit
        self._lock = Lock()
        self._used: OrderedDict[HasFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def get(self, segment: HasFile) -> SegmentFile:
        """The file of a segment that has been written before."""
        with self._lock:
            return self._get(segment, create=False)

    def get_or_create(self, segment: HasFile) -> SegmentFile:
        """The file of a segment, made if need be."""
        with self._lock:
            return self._get(segment, create=True)

    def _get(self, segment: HasFile, create: bool) -> SegmentFile:
        opened = segment.file
        if opened is not None:
            if segment in self._used:
                self._used.move_to_end(segment)
            return opened
        opened = SegmentFile(self._open(segment.path, create))
        segment.file = opened
        self._used[segment] = None
        if len(self._used) > self._limit:
            oldest, _ = self._used.popitem(last=False)
            oldest.file = None
        return opened

    def _open(self, path: Path, create: bool) -> File:
        if not create or self._disk.exists(path):
            return self._disk.open(path, writable=True)
        # A new directory is made durable by the first flush: the writer must not wait for that.
        self._disk.mkdir(path.parent, durable=False)
        return self._disk.create(path)

    def pin(self, segment: HasFile) -> SegmentFile:
        """Keep the file for as long as the segment lives: its name is about to mean another file."""
        with self._lock:
            opened = self._get(segment, create=False)
            self._used.pop(segment, None)
            return opened

    def forget(self, segment: HasFile) -> None:
        """The segment is no longer part of the log."""
        with self._lock:
            self._used.pop(segment, None)
            segment.file = None
