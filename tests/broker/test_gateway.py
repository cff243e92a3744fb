"""The gRPC service: what a subscriber may say, what it is answered, and what is in the topics afterwards."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from broker_process import BrokerProcess, free_port
from gateway_cases import METHOD, GatewayProcess, GrpcSubscriber, copy_all
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kafka_process import KafkaProcess
from subscription_cases import entry_of, fill, quick, records, values
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.subscriptions.dead_letters import CAUSE
from semel.subscriptions.grpc import subscriptions_pb2 as pb
from semel.subscriptions.grpc.server import SERVICE, GatewayServer, ServerTls

COUNT = 12


@pytest.fixture(scope="module")
def semel_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("gateway") / "broker").start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture(params=["semel"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


@pytest.fixture
async def cluster(bootstrap: str) -> AsyncIterator[Cluster]:
    async with Cluster(bootstrap) as connected:
        yield connected


@pytest.fixture
async def gateway(bootstrap: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[GatewayServer]:
    async with GatewayServer(bootstrap, "127.0.0.1:0", defaults=quick()) as running:
        yield running
    assert "this is a bug" not in caplog.text


@pytest.fixture
def address(gateway: GatewayServer) -> str:
    return f"127.0.0.1:{gateway.port}"


@pytest.fixture
async def subscriber(address: str) -> AsyncIterator[GrpcSubscriber]:
    async with GrpcSubscriber(address) as connected:
        yield connected


@pytest.fixture
def output(topic: str) -> str:
    return f"{topic}-out"


async def test_a_delivery_is_worked_on_in_a_transaction_that_commits_with_its_ack(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1, keys=1)
    await make_topic(cluster, output)
    ready = await subscriber.setup(topic)
    assert ready.settings.max_in_flight == 16
    delivery = await subscriber.delivery()
    (record,) = delivery.records
    assert (delivery.topic, delivery.partition, delivery.attempt) == (topic, 0, 1)
    assert (record.offset, record.key, record.value) == (0, b"k0", b"0")
    await subscriber.begin(delivery.delivery_id)
    headers = [pb.Header(key="a", value=b"1"), pb.Header(key="b")]
    await subscriber.state(delivery.delivery_id, 7, output, b"x", key=b"k", headers=headers, timestamp_ms=5)
    applied = (await subscriber.receive("applied")).applied
    assert (applied.delivery_id, applied.statement_id) == (delivery.delivery_id, 7)
    assert (applied.partition, applied.offset) == (0, 0)
    assert await records(cluster, output) == []
    await subscriber.ack(delivery.delivery_id)
    assert (await subscriber.receive("committed")).committed.delivery_id == delivery.delivery_id
    (copied,) = await records(cluster, output)
    assert (copied.key, copied.value, copied.timestamp) == (b"k", b"x", 5)
    assert list(copied.headers) == [("a", b"1"), ("b", None)]
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None and entry.offset == 1
    assert await subscriber.leave() == (grpc.StatusCode.OK, "")
