"""What tests of transactions have in common: topics, and readers of either isolation level."""

from __future__ import annotations

import asyncio

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.metadata import TopicPartition

POLL_MS = 1_000
PAUSE_S = 0.02
SETTLE_TIMEOUT_S = 30


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
