"""What tests of subscriptions have in common: input, quick options, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from transaction_cases import make_topic, read_committed

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.group_member import MemberOptions
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.subscriptions import RedeliveryBackoff, SubscriptionOptions
from semel.subscriptions.entry import Entry, parse_entry
from semel.wire.records import Record

SOON_MS: Final = 20
WAIT_S: Final = 60.0
# The shortest session that Kafka allows.
QUICK: Final = SubscriptionOptions(
    backoff=RedeliveryBackoff(first_ms=SOON_MS, max_ms=200),
    heartbeat_interval_ms=200,
    drain_timeout_ms=2_000,
    member=MemberOptions(session_timeout_ms=6_000, rebalance_timeout_ms=20_000),
)


def quick(**changes: object) -> SubscriptionOptions:
    return replace(QUICK, **changes)  # type: ignore[arg-type]


async def fill(
    cluster: Cluster, topic: str, count: int, *, partitions: int = 1, keys: int = 0, first: int = 0
) -> None:
    """Makes the topic unless it is there, and sends it numbers, with one of so many keys."""
    if not first:
        await make_topic(cluster, topic, partitions)
    async with Producer(cluster) as producer:
        for number in range(first, first + count):
            key = b"k%d" % (number % keys) if keys else None
            await producer.send(
                topic, b"%d" % number, key=key, partition=None if keys else number % partitions
            )


async def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    """All that is committed in a topic, sorted."""
    return sorted(value for partition in await read_committed(cluster, topic) for value in partition)  # type: ignore[type-var]


async def records(cluster: Cluster, topic: str, at_least: int = 0) -> list[Record]:
    """All that is committed in a topic, as records; Kafka shows a commit a moment after it has answered."""
    async with asyncio.timeout(WAIT_S):
        while len(found := await _records(cluster, topic)) < at_least:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
    return found


async def _records(cluster: Cluster, topic: str) -> list[Record]:
    options = ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=50)
    found: list[Record] = []
    async with Consumer(cluster, options) as consumer:
        await consumer.assign(await consumer.partitions_of(topic))
        ends = await consumer.end_offsets()
        while any(consumer.position(where) < end for where, end in ends.items()):
            for batch in await consumer.poll(1_000):
                found += batch.records()
    return found


async def entry_of(cluster: Cluster, group: str, topic: str, partition: int = 0) -> Entry | None:
    """What the group has committed for a partition."""
    where = TopicPartition(topic, partition)
    found = await fetch_offsets(cluster, group, [where])
    return None if where not in found else parse_entry(found[where].offset, found[where].metadata)


async def eventually(what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - the condition is of another process, or of many tasks
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout_s} s") from None


async def readers_pass(cluster: Cluster, topic: str) -> None:
    """Waits until no open transaction holds up the readers of a topic."""
    admin, where = Admin(cluster), TopicPartition(topic, 0)
    async with asyncio.timeout(WAIT_S):
        while True:
            stable = await admin.list_offsets({where: LATEST}, isolation_level=READ_COMMITTED)
            if stable == await admin.list_offsets({where: LATEST}):
                return
            await asyncio.sleep(0.02)
