"""Dead letters back to where they came from: a subscription of its own, so that each goes back once.

The group of the redrive is named after the dead-letter topic and the group that gave the letters up. What it
has sent back is acknowledged there, in the same transaction; so it may be stopped and started at any time,
and a second run sends back only what has died since.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.subscriptions.dead_letters import origin_of, redriven_headers
from semel.subscriptions.delivery import Delivery
from semel.subscriptions.options import SubscriptionOptions
from semel.subscriptions.subscription import Channel, Subscription, run_all
from semel.wire.records import Record

CONCURRENCY: Final = 16
LOOK_PAUSE_S: Final = 0.1


class Redriven(NamedTuple):
    """How many went back, by topic."""

    counts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def redrive_group(dead_topic: str, group_id: str) -> str:
    return f"{dead_topic}.redrive.{group_id}"


async def redrive(cluster: Cluster, dead_topic: str, group_id: str) -> Redriven:
    """Sends back all that is in the dead-letter topic now and was given up by the group."""
    ends = await _ends(cluster, dead_topic)
    counts: dict[str, int] = {}
    options = SubscriptionOptions(
        max_in_flight=2 * CONCURRENCY,
        filter=partial(_is_of_group, group_id),
    )
    group = redrive_group(dead_topic, group_id)
    async with Subscription(cluster, [dead_topic], group, options) as subscription:
        channel = subscription.channel()
        workers = [_send_all_back(channel, group_id, counts) for _ in range(CONCURRENCY)]
        running = asyncio.create_task(run_all(workers))
        looking = asyncio.create_task(_wait_until_passed(cluster, group, ends))
        await asyncio.wait([running, looking], return_when=asyncio.FIRST_COMPLETED)
        looking.cancel()
    await running
    return Redriven(counts)


async def _send_all_back(channel: Channel, group_id: str, counts: dict[str, int]) -> None:
    """What cannot go back (its topic is gone, say) ends the redrive, and stays where it is."""
    async for delivery in channel:
        await _send_back(group_id, counts, delivery)


async def _send_back(group_id: str, counts: dict[str, int], delivery: Delivery) -> None:
    origin = origin_of(delivery.headers)
    assert origin is not None, "the filter lets nothing else through"
    transaction = delivery.transaction()
    await transaction.publish(
        origin.where.topic,
        delivery.value,
        key=delivery.key,
        partition=origin.where.partition,
        headers=redriven_headers(delivery.headers, group_id),
    )
    await transaction.ack()
    counts[origin.where.topic] = counts.get(origin.where.topic, 0) + 1


def _is_of_group(group_id: str, record: Record) -> bool:
    origin = origin_of(record.headers)
    return origin is not None and origin.group_id == group_id


async def _ends(cluster: Cluster, topic: str) -> dict[TopicPartition, int]:
    partitions = (await Admin(cluster).describe_topic(topic)).partitions
    wanted = {TopicPartition(topic, each.partition): LATEST for each in partitions}
    found = await Admin(cluster).list_offsets(wanted, isolation_level=READ_COMMITTED)
    return {where: answer.offset for where, answer in found.items()}


async def _wait_until_passed(cluster: Cluster, group: str, ends: Mapping[TopicPartition, int]) -> None:
    """Until the group has acknowledged everything below: this process, or another one, has sent it back."""
    while True:
        committed = await fetch_offsets(cluster, group, list(ends), require_stable=False)
        if all(where in committed and committed[where].offset >= end for where, end in ends.items()):
            return
        await asyncio.sleep(LOOK_PAUSE_S)
