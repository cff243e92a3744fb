"""Loading the index of a segment at rest: from its file, and from the segment where that is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from semel.errors import CorruptionError
from semel.log.partition import AbortedTransaction
from semel.storage.files import SegmentFile
from semel.storage.index import SegmentIndex
from semel.storage.segment import Segment, read_fully, scan
from semel.wire.batch import Buffer
from semel.wire.records import read_end_marker

if TYPE_CHECKING:
    from semel.storage.partition import PartitionStore

SCANNED_INTERVAL_BYTES: Final = 4096
"""Distance of the index entries where a lost index is made again."""


def load_index(partition: PartitionStore, last: int) -> tuple[SegmentIndex, dict[int, int]]:
    """Load the index of a segment; also tells which transactions are open at its end.

    Where its file says nothing, the segment is read; for that, the one before must tell what is open at its
    beginning, which may in turn have to be read.
    """
    segments = partition.segments
    first = last
    index, opened = _load_blocks(partition, segments[first])
    while opened is None and first > 0:
        first -= 1
        index, opened = _load_blocks(partition, segments[first])
    opened = opened or {}
    for i in range(first, last + 1):
        segment = segments[i]
        if i > first:
            index = SegmentIndex(segment.base_offset)
        if index.log_size < segment.size or index.log_size == 0:
            # Compaction may leave a segment empty, and a crash may take its index: then nothing can be said.
            _scan_into(partition, segment, index, opened)
        elif index.end_offset != segment.end_offset:
            raise CorruptionError(
                f"{partition.directory} has no segment {index.end_offset}, which follows "
                f"{segment.path.name}: something else deleted it; restore it, or delete the topic"
            )
        segment.index = index
        segment.max_timestamp = index.max_timestamp
        segment.aborted_from = index.first_aborted()
    return index, opened


def _load_blocks(partition: PartitionStore, segment: Segment) -> tuple[SegmentIndex, dict[int, int] | None]:
    disk = partition.store.disk
    index = SegmentIndex(segment.base_offset)
    path = segment.index_path
    if not disk.exists(path):
        return index, None
    file = SegmentFile(disk.open(path))
    return index, index.load_blocks(file.pread(file.size(), 0), segment.base_offset, segment.size)


def _scan_into(
    partition: PartitionStore, segment: Segment, index: SegmentIndex, opened: dict[int, int]
) -> None:
    """Complete an index, and the table of open transactions, from the segment itself."""
    file = partition.store.files.get(segment)
    for batch in scan(file, index.log_size, segment.size):
        if batch.is_control:
            marker = read_fully(file, batch.size, batch.position)
            aborted = ended_by(marker, batch.base_offset, batch.producer_id, opened)
            opened.pop(batch.producer_id, None)
            if aborted is not None:
                index.add_aborted(aborted)
        elif batch.is_transactional:
            opened.setdefault(batch.producer_id, batch.base_offset)
        index.add(
            batch.base_offset, batch.end_offset, batch.size, batch.max_timestamp, SCANNED_INTERVAL_BYTES
        )


def ended_by(
    batch: Buffer, marker_offset: int, producer_id: int, opened: dict[int, int]
) -> AbortedTransaction | None:
    """What a marker makes unreadable, if it aborts a transaction that has records here."""
    marker = read_end_marker(batch)
    first_offset = opened.get(producer_id)
    if marker is None or marker.commit or first_offset is None:
        return None
    stable = min(
        (first for producer, first in opened.items() if producer != producer_id), default=marker_offset + 1
    )
    return AbortedTransaction(producer_id, first_offset, marker_offset, stable)
