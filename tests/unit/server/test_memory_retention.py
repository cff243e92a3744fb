"""In memory there is no journal to keep: what retention lets go of is given back."""

from __future__ import annotations

from node_cases import until

import semel
from semel.client.admin import EARLIEST, LATEST, Admin
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.storage.store import Store

SEGMENT_BYTES = 64 * 1024
RETENTION_BYTES = 4 * SEGMENT_BYTES
WRITTEN_BYTES = 20 * SEGMENT_BYTES
VALUE = bytes(4096)
KEPT_BYTES = RETENTION_BYTES + 2 * SEGMENT_BYTES
"""Whole segments go, and the newest is not full."""


async def test_a_broker_in_memory_keeps_no_more_than_retention_says() -> None:
    settings = {"log.retention.check.interval.ms": 10}
    where = TopicPartition("t", 0)
    async with semel.Broker(settings=settings) as broker, Cluster(broker.bootstrap) as cluster:
        admin = Admin(cluster)
        configs = {"segment.bytes": str(SEGMENT_BYTES), "retention.bytes": str(RETENTION_BYTES)}
        await admin.create_topic("t", partitions=1, configs=configs)
        async with Producer(cluster) as producer:
            for _ in range(WRITTEN_BYTES // len(VALUE)):
                await producer.send("t", VALUE)
        store = broker.server.node.life.store
        await until(lambda: held_bytes(store) <= KEPT_BYTES, "retention")
        offsets = [(await admin.list_offsets({where: place}))[where].offset for place in (EARLIEST, LATEST)]
        assert offsets[1] == WRITTEN_BYTES // len(VALUE)
        assert 0 < (offsets[1] - offsets[0]) * len(VALUE) <= KEPT_BYTES


def held_bytes(store: Store) -> int:
    """What all files in memory have together."""
    disk = store.disk
    partitions = [
        store.directory / topic / partition
        for topic in disk.listdir(store.directory)
        for partition in disk.listdir(store.directory / topic)
    ]
    return sum(disk.open(path / name).size() for path in partitions for name in disk.listdir(path))
