"""One segment of a partition: a file of whole batches, and the ways to find and read them.

A segment belongs to the event loop. What it says of itself (`size`, `end_offset`, the index) covers the
batches that have been revealed, that is, that are written and may be read. The index of a segment that has
been at rest is read from its file, or from the segment, when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

from semel.errors import CorruptionError
from semel.storage.files import SegmentFile, index_name, log_name
from semel.storage.index import NO_OFFSET, NO_TIMESTAMP, SegmentIndex
from semel.wire.batch import CONTROL_BIT, HEADER_BYTES, PREFIX_BYTES, TRANSACTIONAL_BIT

if TYPE_CHECKING:
    from semel.storage.partition import PartitionStore

SCAN_HEADER: Final = Struct(">qi9xhi8xqq")
"""Of a batch header: base offset, length, attributes, last offset delta, max timestamp, producer id."""
SCAN_BYTES: Final = 8 * 1024
"""How much a scan reads at once: a little more than lies between two entries of the index."""


class Region:
    """A run of bytes of one segment, from the beginning of a batch. It stays readable if the segment goes."""

    __slots__ = ("_file", "end_offset", "position", "size")

    def __init__(self, file: SegmentFile, position: int, size: int, end_offset: int) -> None:
        self._file = file
        self.position = position
        self.size = size
        self.end_offset = end_offset
        """All records in here lie below it. It may be somewhat larger than needed."""

    def __len__(self) -> int:
        return self.size

    def fileno(self) -> int | None:
        """The descriptor to send from, valid while this object lives; None if there is none."""
        return self._file.fileno()

    def load(self) -> bytes:
        return read_fully(self._file, self.size, self.position)


class ScannedBatch:
    """What a scan tells of a batch."""

    __slots__ = (
        "attributes",
        "base_offset",
        "end_offset",
        "max_timestamp",
        "position",
        "producer_id",
        "size",
    )

    def __init__(
        self,
        position: int,
        size: int,
        base_offset: int,
        end_offset: int,
        attributes: int,
        max_timestamp: int,
        producer_id: int,
    ) -> None:
        self.position = position
        self.size = size
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.attributes = attributes
        self.max_timestamp = max_timestamp
        self.producer_id = producer_id

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0


class Segment:
    """A file of a partition, from `base_offset` to `end_offset`, the base of the next."""

    __slots__ = (
        "aborted_from",
        "base_offset",
        "end_offset",
        "file",
        "index",
        "is_durable_name",
        "is_gone",
        "max_timestamp",
        "partition",
        "size",
    )

    def __init__(self, partition: PartitionStore, base_offset: int) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.size = 0
        self.max_timestamp = NO_TIMESTAMP
        self.aborted_from = NO_OFFSET
        """The smallest first offset of the transactions that were aborted by a marker in this segment."""
        self.index: SegmentIndex | None = None
        """None if it has to be loaded first."""
        self.file: SegmentFile | None = None
        self.is_durable_name = False
        """Whether the directory is known to hold this file after a crash."""
        self.is_gone = False
        """Deleted, dropped or replaced: no worker may write to its names any more."""

    def __repr__(self) -> str:
        return f"Segment({self.base_offset}..{self.end_offset}, {self.size} bytes)"

    @property
    def path(self) -> Path:
        return self.partition.directory / log_name(self.base_offset)

    @property
    def index_path(self) -> Path:
        return self.partition.directory / index_name(self.base_offset)


def read_fully(file: SegmentFile, size: int, position: int) -> bytes:
    """Bytes that must be there."""
    chunk = file.pread(size, position)
    if len(chunk) == size:
        return chunk
    chunks = [chunk]
    while chunk and (missing := size - sum(map(len, chunks))):
        chunk = file.pread(missing, position + size - missing)
        chunks.append(chunk)
    whole = b"".join(chunks)
    if len(whole) < size:
        raise CorruptionError(
            f"{file.path} ends at {position + len(whole)} where it should reach {position + size}: "
            "it was cut by something else than this broker; restore it, or delete the topic"
        )
    return whole


def scan(file: SegmentFile, position: int, end: int) -> Iterator[ScannedBatch]:
    """The batches from `position`, where one begins, to `end`, where one ends."""
    chunk = b""
    chunk_at = position
    while position < end:
        at = position - chunk_at
        if at + HEADER_BYTES > len(chunk):
            chunk = read_fully(file, min(SCAN_BYTES, end - position), position)
            chunk_at, at = position, 0
        if len(chunk) < HEADER_BYTES:
            raise _damaged(file, position)
        base_offset, length, attributes, delta, max_timestamp, producer_id = SCAN_HEADER.unpack_from(
            chunk, at
        )
        size = length + PREFIX_BYTES
        if size < HEADER_BYTES or position + size > end or delta < 0:
            raise _damaged(file, position)
        yield ScannedBatch(
            position, size, base_offset, base_offset + delta + 1, attributes, max_timestamp, producer_id
        )
        position += size


def _damaged(file: SegmentFile, position: int) -> CorruptionError:
    return CorruptionError(
        f"{file.path} has no record batch at byte {position}, where one must begin: it was damaged on disk; "
        "restore it, or delete the topic"
    )
