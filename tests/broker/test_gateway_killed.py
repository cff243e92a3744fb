"""Gateways, their subscribers and their brokers are killed: outputs and acknowledgements agree, by content.

Subscribers copy records from one topic to another, one transaction each. Whatever dies at whatever step, in
the end every record was copied once, and nothing that was committed is seen again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import pytest
from broker_process import BrokerProcess, StartBroker, free_port
from gateway_cases import WAIT_S, GatewayProcess, GrpcSubscriber, ProcessLines
from kafka_process import KafkaProcess
from subscription_cases import fill, quick
from test_subscriptions_killed import assert_copied_once, entry_of_dead
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.errors import SemelError
from semel.subscriptions.grpc.server import GatewayServer

PROGRAM: Final = Path(__file__).with_name("grpc_subscriber_process.py")
COUNT: Final = 12
KEYS: Final = 5

GATEWAY_STEPS: Final = [
    *("slot-taken", "entry-read", "taken-over", "dealt:2", "begun:2", "published:2", "sealed:2"),
    *("sending-offsets:3", "offsets-sent:3", "committed:3", "committed:6"),
]
SUBSCRIBER_STEPS: Final = [
    *("ready", "delivery:1", "delivery:3", "begun:2", "stated:2", "applied:2", "acked:1", "acked:3"),
    *("committed:1", "committed:5"),
]
ON_KAFKA: Final = {"published:2", "offsets-sent:3", "committed:3", "applied:2", "acked:3"}


@pytest.fixture
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


def on_both(steps: list[str]) -> list[object]:
    """Every step on Semel, the most telling ones on Apache Kafka, too."""
    return [
        *(pytest.param("semel", step, id=f"semel-{step}") for step in steps),
        *(pytest.param("kafka", step, id=f"kafka-{step}") for step in steps if step in ON_KAFKA),
    ]


class Copier:
    """Copies through a gateway, and remembers what it took and what it was told."""

    def __init__(self) -> None:
        self.took: list[int] = []
        self.committed: set[int] = set()
        self.others: list[str] = []

    async def run(self, address: str, topic: str, output: str, count: int) -> None:
        """Until so many are committed, or the stream ends."""
        offsets: dict[int, int] = {}
        async with GrpcSubscriber(address) as subscriber:
            await subscriber.setup(topic, open_at_once=3)
            while len(self.committed) < count:
                response = await subscriber.receive()
                kind = response.WhichOneof("message")
                if kind == "delivery":
                    delivery = response.delivery
                    offsets[delivery.delivery_id] = delivery.records[0].offset
                    self.took.append(delivery.records[0].offset)
                    await subscriber.copy(delivery, output)
                elif kind == "committed":
                    self.committed.add(offsets[response.committed.delivery_id])
                elif kind != "applied":
                    self.others.append(str(kind))

    async def run_until_it_breaks(self, address: str, topic: str, output: str) -> None:
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await self.run(address, topic, output, sys.maxsize)


@pytest.mark.parametrize(("bootstrap", "step"), on_both(GATEWAY_STEPS), indirect=["bootstrap"])
async def test_a_gateway_killed_at_any_step_has_copied_nothing_twice_and_loses_nothing(
    bootstrap: str, cluster: Cluster, topic: str, output: str, tmp_path: Path, step: str
) -> None:
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    dying = GatewayProcess(bootstrap, free_port(), tmp_path / "gateway.log", die_at=step)
    before, after = Copier(), Copier()
    try:
        await asyncio.to_thread(dying.start)
        await before.run_until_it_breaks(dying.address, topic, output)
        await dying.died()
    finally:
        dying.kill()
        print(dying.log)
    decided = await entry_of_dead(cluster, topic)
    assert before.committed <= decided, "what was told committed is"
    async with GatewayServer(bootstrap, "127.0.0.1:0", defaults=quick()) as gateway:
        await after.run(f"127.0.0.1:{gateway.port}", topic, output, COUNT - len(decided))
    assert not decided & set(after.took), "what was acknowledged is never seen again"
    await assert_copied_once(cluster, topic, output)


@pytest.mark.parametrize(("bootstrap", "step"), on_both(SUBSCRIBER_STEPS), indirect=["bootstrap"])
async def test_a_subscriber_killed_at_any_step_has_copied_nothing_twice_and_loses_nothing(
    bootstrap: str, cluster: Cluster, topic: str, output: str, step: str
) -> None:
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    async with GatewayServer(bootstrap, "127.0.0.1:0", defaults=quick()) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        dying = ProcessLines(
            [sys.executable, str(PROGRAM), address, topic, output], {**os.environ, "TEST_DIE_AT": step}
        )
        try:
            await asyncio.to_thread(dying.process.wait, WAIT_S)
        finally:
            dying.kill()
        survivor = Copier()
        # Well before the delivery timeout of 30 s: the gateway noticed at once.
        copying = asyncio.create_task(survivor.run(address, topic, output, COUNT))
        await acknowledged(cluster, topic, COUNT, timeout_s=20)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
    assert survivor.others == []
    assert len(survivor.took) == len(set(survivor.took))
    await assert_copied_once(cluster, topic, output)


async def test_a_broker_killed_again_and_again_behind_a_gateway_neither_loses_nor_doubles(
    start_broker: StartBroker, topic: str, output: str
) -> None:
    broker = start_broker()
    count = 200
    copiers = [Copier() for _ in range(3)]
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, topic, count, keys=20)
        await make_topic(cluster, output)
        async with GatewayServer(broker.bootstrap, "127.0.0.1:0", defaults=quick()) as gateway:
            address = f"127.0.0.1:{gateway.port}"
            running = [
                asyncio.create_task(copier.run(address, topic, output, sys.maxsize)) for copier in copiers
            ]
            for killed_at in (20, 70, 120):
                await committed(copiers, killed_at)
                await asyncio.to_thread(broker.restart)
            await acknowledged(cluster, topic, count)
            for task in running:
                assert not task.done(), "the streams outlive the broker"
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await assert_copied_once(cluster, topic, output, count)


async def committed(copiers: list[Copier], count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(len(copier.committed) for copier in copiers) < count:  # noqa: ASYNC110 - of many tasks
            await asyncio.sleep(0.01)


async def acknowledged(cluster: Cluster, topic: str, count: int, timeout_s: float = WAIT_S) -> None:
    """Waits until the entry says so, of a broker that may not be there yet."""
    async with asyncio.timeout(timeout_s):
        while True:
            with suppress(SemelError):
                if len(await entry_of_dead(cluster, topic)) >= count:
                    return
            await asyncio.sleep(0.05)
