"""A broker inside the process: in a thread or on the running loop, in memory or in a directory."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import semel
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.errors import SemelError


def loop_threads() -> int:
    """How many brokers have a thread of their own; the one of the fixtures may be among them."""
    return len([thread for thread in threading.enumerate() if thread.name == "semel-broker"])


async def send(bootstrap: str, value: bytes) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic("t")
        async with Producer(cluster) as producer:
            await producer.send("t", value)


async def values(bootstrap: str) -> list[bytes | None]:
    async with Cluster(bootstrap) as cluster, Consumer(cluster) as consumer:
        await consumer.assign([TopicPartition("t", 0)])
        return [record.value for batch in await consumer.poll(10_000) for record in batch.records()]


async def test_it_runs_on_the_loop_that_is_running() -> None:
    loops = loop_threads()
    async with semel.Broker() as broker:
        assert loop_threads() == loops
        await send(broker.bootstrap, b"value")
        assert await values(broker.bootstrap) == [b"value"]
        host, _, port = broker.bootstrap.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_what_is_written_to_a_directory_is_there_for_the_next(tmp_path: Path) -> None:
    with semel.Broker(tmp_path / "data", settings={"durability": "os"}) as broker:
        await send(broker.bootstrap, b"kept")
        with pytest.raises(SemelError, match="pid"):
            semel.Broker(tmp_path / "data").start()
    async with semel.Broker(str(tmp_path / "data")) as broker:
        assert await values(broker.bootstrap) == [b"kept"]


async def test_brokers_in_memory_know_nothing_of_each_other() -> None:
    with semel.Broker() as one, semel.Broker() as other:
        assert one.bootstrap != other.bootstrap
        await send(one.bootstrap, b"value")
        async with Cluster(other.bootstrap) as cluster:
            assert await Admin(cluster).list_topics() == []


def test_a_broker_that_is_not_running_says_so() -> None:
    broker = semel.Broker()
    with pytest.raises(SemelError, match="not running"):
        _ = broker.bootstrap
    with broker, pytest.raises(SemelError, match="started before"):
        broker.start()
    broker.stop()


def test_a_start_that_fails_leaves_no_thread_behind() -> None:
    with semel.Broker() as broker:
        loops = loop_threads()
        second = semel.Broker(settings={"listeners": broker.bootstrap})
        with pytest.raises(SemelError):
            second.start()
        assert loop_threads() == loops
