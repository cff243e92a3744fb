"""How far a group is behind: records that it will still get, and nothing else.

The distance from the committed offset to the end counts too much on a transactional topic: markers,
aborted records and records of open transactions are offsets, but nobody gets to read them, so such a
distance never reaches 0. Here the end is the last stable offset. A short gap up to it is read as a
consumer with read_committed would read it, and what that consumer would get is counted. A long gap is
not worth reading, and is given as an upper bound.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions, Start
from semel.client.metadata import TopicPartition
from semel.errors import BrokerError

MAX_COUNTED_GAP: Final = 10_000
"""Offsets of one partition that are read to count what they hold."""
MAX_COUNTED_GAPS: Final = 200_000
"""Offsets of all partitions together."""
COUNTING_TIMEOUT_MS: Final = 15_000
POLL_MS: Final = 200


class Lag(NamedTuple):
    """What is left to read of one partition."""

    end_offset: int
    last_stable_offset: int
    records: int
    is_exact: bool

    def __str__(self) -> str:
        return str(self.records) if self.is_exact else f"<= {self.records}"


async def find_lags(
    cluster: Cluster, committed: Mapping[TopicPartition, int], *, max_counted_gap: int = MAX_COUNTED_GAP
) -> dict[TopicPartition, Lag]:
    """The lag of each partition whose committed offset is given."""
    admin = Admin(cluster)
    ends = await admin.list_offsets(dict.fromkeys(committed, LATEST))
    stable = await admin.list_offsets(dict.fromkeys(committed, LATEST), isolation_level=READ_COMMITTED)
    starts = await admin.list_offsets(dict.fromkeys(committed, EARLIEST))
    lags: dict[TopicPartition, Lag] = {}
    to_count: dict[TopicPartition, int] = {}
    room = MAX_COUNTED_GAPS
    for where, offset in committed.items():
        begin = max(offset, starts[where].offset)
        gap = max(0, stable[where].offset - begin)
        lags[where] = Lag(ends[where].offset, stable[where].offset, gap, gap == 0)
        if 0 < gap <= min(max_counted_gap, room):
            room -= gap
            to_count[where] = begin
    if to_count:
        counts = await _count(cluster, to_count, {where: stable[where].offset for where in to_count})
        for where, records in counts.items():
            lags[where] = lags[where]._replace(records=records, is_exact=True)
    return lags


async def _count(
    cluster: Cluster, begins: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """The records that a reader would get; partitions that could not be read to their end are left out."""
    counts = dict.fromkeys(begins, 0)
    options = ConsumerOptions(isolation_level=READ_COMMITTED, retry_timeout_ms=COUNTING_TIMEOUT_MS)
    loop = asyncio.get_running_loop()
    give_up = loop.time() + COUNTING_TIMEOUT_MS / 1000
    async with Consumer(cluster, options) as consumer:
        for where, begin in begins.items():
            await consumer.assign([where], Start(offset=begin))
        while loop.time() < give_up:
            if all(consumer.position(where) >= end for where, end in ends.items()):
                break
            try:
                batches = await consumer.poll(POLL_MS)
            except BrokerError:
                break  # Retention may be faster than we are.
            for batch in batches:
                if batch.header.base_offset < ends[batch.where]:
                    counts[batch.where] += len(batch.records())
        return {where: count for where, count in counts.items() if consumer.position(where) >= ends[where]}
