"""A thousand subscribers on a hundred partitions, through one gateway, which is a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import grpc
from broker_process import StartBroker, free_port
from gateway_cases import GatewayProcess, GrpcSubscriber
from subscription_cases import fill, records
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.subscriptions.grpc import subscriptions_pb2 as pb

SUBSCRIBERS: Final = 1_000
PARTITIONS: Final = 100
RECORDS: Final = 2_000
KEYS: Final = 1_500
CONNECTIONS: Final = 10
LOST: Final = 10
"""One in so many is lost with a statement in its first delivery's transaction."""
TIMEOUT_S: Final = 240.0


async def test_a_thousand_subscribers_share_a_hundred_partitions(
    start_broker: StartBroker, topic: str, tmp_path: Path
) -> None:
    broker = start_broker()
    gateway = GatewayProcess(broker.bootstrap, free_port(), tmp_path / "gateway.log")
    await asyncio.to_thread(gateway.start)
    try:
        async with Cluster(broker.bootstrap) as cluster:
            await share(cluster, gateway.address, topic)
        assert await asyncio.to_thread(gateway.stop) == 0
    finally:
        gateway.kill()
        print("\n".join(line for line in gateway.log.splitlines() if " INFO " not in line))
    assert "this is a bug" not in gateway.log


async def share(cluster: Cluster, address: str, topic: str) -> None:
    output = f"{topic}-out"
    await fill(cluster, topic, RECORDS, partitions=PARTITIONS, keys=KEYS)
    await make_topic(cluster, output, partitions=10)
    # Each has an option of its own, or all would share one connection.
    channels = [
        grpc.aio.insecure_channel(address, options=(("grpc.channel_id", number),))
        for number in range(CONNECTIONS)
    ]
    committed: list[int] = []
    took: Counter[int] = Counter()
    all_are_there = asyncio.Barrier(SUBSCRIBERS + 1)
    working = [
        asyncio.create_task(
            copy(channels[number % CONNECTIONS], number, topic, all_are_there, committed, took)
        )
        for number in range(SUBSCRIBERS)
    ]
    async with asyncio.timeout(TIMEOUT_S):
        await all_are_there.wait()
        began = time.monotonic()
        while len(committed) < RECORDS:
            await asyncio.sleep(0.1)
            for task in working:
                if task.done():
                    task.result()
    print(f"{len(took)} subscribers copied {RECORDS} in {time.monotonic() - began:.1f} s")
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    for channel in channels:
        await channel.close()
    assert len(took) > SUBSCRIBERS // 2, "they share the work"
    copied = await records(cluster, output)
    assert sorted(int(record.value or b"") for record in copied) == list(range(RECORDS))
    places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    found = await fetch_offsets(cluster, topic, places)
    assert sum(committed_offset.offset for committed_offset in found.values()) == RECORDS


async def copy(
    channel: Any,
    number: int,
    topic: str,
    all_are_there: asyncio.Barrier,
    committed: list[int],
    took: Counter[int],
) -> None:
    """Copies for ever; one that is to be lost is gone in the midst of its first delivery."""
    async with GrpcSubscriber("", channel) as stream:
        await stream.setup(topic, open_at_once=0)
        await all_are_there.wait()
        await stream.send(credits=pb.Credits(count=1))
        while True:
            response = await stream.receive(timeout_s=TIMEOUT_S)
            kind = response.WhichOneof("message")
            if kind == "delivery":
                took[number] += 1
                if number % LOST == 0:
                    await stream.begin(response.delivery.delivery_id)
                    await stream.state(response.delivery.delivery_id, 1, f"{topic}-out", b"lost")
                    return
                await stream.copy(response.delivery, f"{topic}-out")
            elif kind == "committed":
                committed.append(response.committed.delivery_id)
            else:
                assert kind == "applied", response
