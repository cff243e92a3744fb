"""Finding offsets by time: what ListOffsets answers.

Timestamps are the producers' and come in any order. The first record at or after a time is the one with the
smallest offset; it is looked for in the first batch whose largest timestamp reaches that time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from semel.storage.segment import ScannedBatch, read_fully, scan
from semel.wire.batch import InvalidBatch
from semel.wire.records import read_records

if TYPE_CHECKING:
    from semel.storage.partition import PartitionStore

MAX_OPENED_BYTES: Final = 16 * 1024 * 1024
"""A batch that would be larger than this when opened, or cannot be opened, counts as one record."""


@dataclass(slots=True, frozen=True)
class TimestampedOffset:
    offset: int
    timestamp: int


def first_at_or_after(
    partition: PartitionStore, timestamp: int, start_offset: int, end_offset: int
) -> TimestampedOffset | None:
    """The first record of the range that is not older than `timestamp`."""
    for i in range(partition.segment_holding(start_offset), len(partition.segments)):
        if partition.segments[i].base_offset >= end_offset:
            break
        if partition.max_timestamp_of(i) >= timestamp:
            found = _first_in_segment(partition, i, timestamp, start_offset, end_offset)
            if found is not None:
                return found
    return None


def _first_in_segment(
    partition: PartitionStore, i: int, timestamp: int, start_offset: int, end_offset: int
) -> TimestampedOffset | None:
    segment = partition.segments[i]
    position = max(partition.index_of(i).time_floor(timestamp), partition.locate(i, start_offset)[0])
    file = partition.store.files.get(segment)
    for batch in scan(file, position, segment.size):
        if batch.base_offset >= end_offset:
            break
        if batch.max_timestamp >= timestamp:
            found = _first_in_batch(
                read_fully(file, batch.size, batch.position), batch, timestamp, start_offset
            )
            if found is not None:
                return found
    return None


def _first_in_batch(
    stored: bytes, batch: ScannedBatch, timestamp: int, start_offset: int
) -> TimestampedOffset | None:
    for found in _times(stored, batch, start_offset):
        if found.timestamp >= timestamp:
            return found
    return None


def _times(stored: bytes, batch: ScannedBatch, start_offset: int) -> list[TimestampedOffset]:
    """When the records of a batch are from; only from `start_offset` on, since the log may begin within."""
    try:
        records = read_records(stored, MAX_OPENED_BYTES)
    except InvalidBatch:
        return [TimestampedOffset(max(batch.base_offset, start_offset), batch.max_timestamp)]
    return [TimestampedOffset(r.offset, r.timestamp) for r in records if r.offset >= start_offset]


def newest(partition: PartitionStore, start_offset: int, end_offset: int) -> TimestampedOffset | None:
    """The first record of the range with the largest timestamp in it."""
    found: TimestampedOffset | None = None
    for i in range(partition.segment_holding(start_offset), len(partition.segments)):
        segment = partition.segments[i]
        if segment.base_offset >= end_offset:
            break
        if segment.size and (found is None or partition.max_timestamp_of(i) > found.timestamp):
            newer = _newest_in_segment(partition, i, start_offset, end_offset)
            if newer is not None and (found is None or newer.timestamp > found.timestamp):
                found = newer
    return found


def _newest_in_segment(
    partition: PartitionStore, i: int, start_offset: int, end_offset: int
) -> TimestampedOffset | None:
    timestamp = _max_timestamp_before(partition, i, end_offset)
    found = _first_in_segment(partition, i, timestamp, start_offset, end_offset)
    if found is not None:
        return found
    # It lies before the start: only a look at everything after the start helps.
    segment = partition.segments[i]
    file = partition.store.files.get(segment)
    timestamps: list[int] = []
    for batch in scan(file, partition.locate(i, start_offset)[0], segment.size):
        if batch.base_offset >= start_offset:
            timestamps.append(batch.max_timestamp)
        else:
            stored = read_fully(file, batch.size, batch.position)
            timestamps.extend(found.timestamp for found in _times(stored, batch, start_offset))
        if batch.end_offset >= end_offset:
            break
    if not timestamps:
        return None
    return _first_in_segment(partition, i, max(timestamps), start_offset, end_offset)


def _max_timestamp_before(partition: PartitionStore, i: int, end_offset: int) -> int:
    """The largest timestamp in a segment below `end_offset`."""
    segment = partition.segments[i]
    if end_offset >= segment.end_offset:
        return partition.max_timestamp_of(i)
    index = partition.index_of(i)
    entry = bisect_right(index.offsets, end_offset) - 1
    if entry < 0:
        return -1
    timestamp = index.timestamps[entry]
    file = partition.store.files.get(segment)
    for batch in scan(file, index.positions[entry], segment.size):
        if batch.base_offset >= end_offset:
            break
        timestamp = max(timestamp, batch.max_timestamp)
    return timestamp
