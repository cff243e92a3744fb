"""What tests of transactions have in common: topics, and readers of either isolation level."""

from __future__ import annotations

import asyncio

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.coordinator import TransactionCoordinator
from semel.client.metadata import TopicPartition
from semel.wire.messages.add_partitions_to_txn import AddPartitionsToTxnRequest

POLL_MS = 1_000
PAUSE_S = 0.02
SETTLE_TIMEOUT_S = 30


class SlowToJoin(TransactionCoordinator):
    """From `stop` to `go_on` partitions are about to join, as in the pause before a request is sent again."""

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        super().__init__(cluster, transactional_id)
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.is_asked = asyncio.Event()

    def stop(self) -> None:
        self._goes_on.clear()
        self.is_asked.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    async def _add_partitions(self, request: AddPartitionsToTxnRequest) -> None:
        self.is_asked.set()
        await self._goes_on.wait()
        await super()._add_partitions(request)


async def make_topic(cluster: Cluster, name: str, partitions: int = 1) -> str:
    """A topic that every broker of the cluster knows."""
    admin = Admin(cluster)
    await admin.create_topic(name, partitions=partitions)
    await admin.describe_topic(name)
    return name


async def settle(cluster: Cluster, topic: str) -> None:
    """Waits until nothing is open in a topic: Kafka answers before it has written the markers."""
    admin = Admin(cluster)
    found = await admin.describe_topic(topic)
    wanted = {TopicPartition(topic, each.partition): LATEST for each in found.partitions}
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while True:
            stable = await admin.list_offsets(wanted, isolation_level=READ_COMMITTED)
            ends = await admin.list_offsets(wanted)
            if all(stable[where].offset == ends[where].offset for where in wanted):
                return
            await asyncio.sleep(PAUSE_S)


async def read_committed(cluster: Cluster, topic: str) -> list[list[bytes | None]]:
    """What is committed in the end, by partition; nothing may be open."""
    await settle(cluster, topic)
    return await read_values(cluster, topic, READ_COMMITTED)


async def read_values(cluster: Cluster, topic: str, isolation_level: int) -> list[list[bytes | None]]:
    """The values of a topic's partitions, up to their end at this isolation level."""
    options = ConsumerOptions(isolation_level=isolation_level, max_wait_ms=50)
    async with Consumer(cluster, options) as consumer:
        partitions = await consumer.partitions_of(topic)
        await consumer.assign(partitions)
        ends = await consumer.end_offsets()
        values: dict[int, list[bytes | None]] = {where.partition: [] for where in partitions}
        while any(consumer.position(where) < end for where, end in ends.items()):
            for batch in await consumer.poll(POLL_MS):
                values[batch.where.partition] += [record.value for record in batch.records()]
    return [values[index] for index in sorted(values)]
