"""A read_committed reader that watches while everything happens, and a last look when it is over."""

from __future__ import annotations

import asyncio
from typing import Final

from semel.client.admin import LATEST, READ_COMMITTED, READ_UNCOMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions, Start
from semel.client.metadata import TopicPartition
from semel.errors import SemelError
from semel.verify.ledger import Content, Ends, Place, Violation, name

POLL_MS: Final = 200
ENDS_EVERY_S: Final = 0.1
REST_TIMEOUT_S: Final = 20.0


class Watcher:
    """Reads all partitions as they grow; what it saw is held against the truth in the end."""

    def __init__(self, bootstrap: str, places: list[Place]) -> None:
        self._bootstrap = bootstrap
        self._partitions = [TopicPartition(*place) for place in places]
        self._positions = dict.fromkeys(self._partitions, 0)
        self.seen: list[tuple[Place, int, bytes]] = []
        self.ends: list[tuple[Place, Ends]] = []
        """Each change of the ends of a partition, in the order in which they were told."""
        self._last: dict[Place, Ends] = {}

    async def watch(self) -> None:
        """Until cancelled. A broker that goes away is waited for."""
        while True:
            try:
                async with Cluster(self._bootstrap) as cluster:
                    looking = asyncio.create_task(self._look_at_ends(cluster))
                    try:
                        await self._read(cluster)
                    finally:
                        looking.cancel()
                        await asyncio.gather(looking, return_exceptions=True)
            except SemelError:
                await asyncio.sleep(ENDS_EVERY_S)

    async def _read(self, cluster: Cluster) -> None:
        options = ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=POLL_MS)
        async with Consumer(cluster, options) as consumer:
            for where, offset in self._positions.items():
                await consumer.assign([where], Start(offset))
            while True:
                for batch in await consumer.poll(POLL_MS):
                    place = (batch.where.topic, batch.where.partition)
                    for record in batch.records():
                        self.seen.append((place, record.offset, record.value or b""))
                    self._positions[batch.where] = batch.header.last_offset + 1

    async def _look_at_ends(self, cluster: Cluster) -> None:
        while True:
            await asyncio.sleep(ENDS_EVERY_S)
            try:
                found = await read_ends(cluster, self._partitions)
            except SemelError:
                continue
            for place, ends in found.items():
                if self._last.get(place) != ends:
                    self._last[place] = ends
                    self.ends.append((place, ends))


async def read_ends(cluster: Cluster, partitions: list[TopicPartition]) -> dict[Place, Ends]:
    """The last stable offset first: the high watermark may have moved on when it is asked for."""
    admin = Admin(cluster)
    wanted = dict.fromkeys(partitions, LATEST)
    stable = await admin.list_offsets(wanted, isolation_level=READ_COMMITTED)
    high = await admin.list_offsets(wanted, isolation_level=READ_UNCOMMITTED)
    return {
        (where.topic, where.partition): Ends(0, stable[where].offset, high[where].offset)
        for where in partitions
    }


async def read_everything(cluster: Cluster, places: list[Place]) -> dict[Place, Content]:
    """The whole content, when nobody writes any more."""
    partitions = [TopicPartition(*place) for place in places]
    contents = {place: Content(ends) for place, ends in (await _at_rest(cluster, partitions)).items()}
    for isolation_level in (READ_COMMITTED, READ_UNCOMMITTED):
        options = ConsumerOptions(isolation_level=isolation_level, max_wait_ms=POLL_MS)
        async with Consumer(cluster, options) as consumer:
            await consumer.assign(partitions, Start(0))
            ends = {where: contents[where.topic, where.partition].ends for where in partitions}
            deadline_s = asyncio.get_running_loop().time() + REST_TIMEOUT_S
            while True:
                left = [
                    where
                    for where in partitions
                    if consumer.position(where)
                    < (ends[where].stable if isolation_level == READ_COMMITTED else ends[where].high)
                ]
                if not left:
                    break
                if asyncio.get_running_loop().time() > deadline_s:
                    raise Violation(f"{left[0]} cannot be read beyond {consumer.position(left[0])}")
                for batch in await consumer.poll(POLL_MS):
                    content = contents[batch.where.topic, batch.where.partition]
                    found = content.committed if isolation_level == READ_COMMITTED else content.stored
                    found.update((record.offset, record.value or b"") for record in batch.records())
    return contents


async def _at_rest(cluster: Cluster, partitions: list[TopicPartition]) -> dict[Place, Ends]:
    """The ends, when no transaction is open any more; some brokers write markers after they answered."""
    deadline_s = asyncio.get_running_loop().time() + REST_TIMEOUT_S
    while True:
        ends = await read_ends(cluster, partitions)
        hanging = [place for place, found in ends.items() if found.stable < found.high]
        if not hanging:
            return ends
        if asyncio.get_running_loop().time() > deadline_s:
            place = hanging[0]
            raise Violation(
                f"{name(place)} is stable up to {ends[place].stable} of {ends[place].high}; all clients are "
                f"gone, and all transactional ids were taken {REST_TIMEOUT_S:.0f} s ago: a transaction hangs"
            )
        await asyncio.sleep(ENDS_EVERY_S)
