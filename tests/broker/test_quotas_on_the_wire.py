"""Client quotas on the wire: the wait is announced, the connection waits for it, and others do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Final

import pytest
from broker_process import StartBroker
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition

from semel.client.connection import Connection, ConnectionOptions
from semel.embedded import Broker
from semel.wire.errors import ErrorCode
from semel.wire.messages import alter_client_quotas as altering
from semel.wire.messages import describe_client_quotas as describing
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from semel.wire.messages.metadata import MetadataRequest, MetadataResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

RATE: Final = 20_000
SAVED: Final = 10 * RATE
"""Bytes that may be used at once."""
NAMED_VERSION: Final = 12
"""Later versions of Produce and Fetch have topic ids."""


async def connect(address: str, client_id: str) -> Connection:
    host, port = address.split(":")
    return await Connection.open(host, int(port), ConnectionOptions(client_id=client_id))


async def set_quota(connection: Connection, client_id: str | None, key: str, value: float) -> None:
    entry = altering.RequestEntryData(
        entity=[altering.EntityData(entity_type="client-id", entity_name=client_id)],
        ops=[altering.OpData(key=key, value=value)],
    )
    request = altering.AlterClientQuotasRequest(entries=[entry])
    answer = await connection.request(request, altering.AlterClientQuotasResponse)
    assert answer.entries[0].error_code == 0, answer.entries[0].error_message


async def create(connection: Connection, topic: str) -> None:
    request = CreateTopicsRequest(topics=[CreatableTopic(name=topic, num_partitions=1, replication_factor=1)])
    await connection.request(request, CreateTopicsResponse)


async def produce(connection: Connection, topic: str, size: int) -> int:
    """Send a record of about this size; the announced wait."""
    batch = build_batch([Record(None, bytes(size), int(time.time() * 1000))])
    part = PartitionProduceData(index=0, records=memoryview(batch))
    request = ProduceRequest(
        acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=topic, partition_data=[part])]
    )
    answer = await connection.request(request, ProduceResponse, max_version=NAMED_VERSION)
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    return answer.throttle_time_ms


async def fetch(connection: Connection, topic: str) -> tuple[int, int]:
    """Read from the beginning, without a session; the bytes that came, and the announced wait."""
    part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = FetchRequest(
        max_wait_ms=0,
        max_bytes=1 << 20,
        session_epoch=-1,
        topics=[FetchTopic(topic=topic, partitions=[part])],
    )
    answer = await connection.request(request, FetchResponse, max_version=NAMED_VERSION)
    size = sum(len(part.records or b"") for topic in answer.responses for part in topic.partitions)
    return size, answer.throttle_time_ms


async def fetch_in_session(connection: Connection, topic: str, session: tuple[int, int]) -> FetchResponse:
    """Begin a session (0, 0), or go on with it: then nothing has to be named again."""
    session_id, epoch = session
    part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = FetchRequest(
        max_wait_ms=0,
        max_bytes=1 << 20,
        session_id=session_id,
        session_epoch=epoch,
        topics=[FetchTopic(topic=topic, partitions=[part])] if epoch == 0 else [],
    )
    return await connection.request(request, FetchResponse, max_version=NAMED_VERSION)


async def metadata_seconds(connection: Connection) -> float:
    began = time.monotonic()
    await connection.request(MetadataRequest(topics=[]), MetadataResponse)
    return time.monotonic() - began


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_a_producer_above_its_rate_is_told_and_waits(topic: str) -> None:
    async def check(address: str) -> None:
        free, bound = await connect(address, "free"), await connect(address, "bound")
        await create(free, topic)
        await set_quota(free, "bound", "producer_byte_rate", RATE)
        await set_quota(free, "modest", "producer_byte_rate", RATE)
        assert await produce(await connect(address, "modest"), topic, SAVED - 1_000) == 0
        throttle_ms = await produce(bound, topic, SAVED + RATE // 2)
        assert 500 <= throttle_ms <= 520
        other, waited = await asyncio.gather(metadata_seconds(free), metadata_seconds(bound))
        assert waited >= throttle_ms / 1000 - 0.05, "the connection is not read from meanwhile"
        assert other < waited
        assert await produce(free, topic, SAVED) == 0, "nobody else is bound"

    with Broker() as broker:
        run(check(broker.bootstrap))


def test_a_consumer_above_its_rate_is_told_and_waits(topic: str) -> None:
    async def check(address: str) -> None:
        free, bound = await connect(address, "free"), await connect(address, "bound")
        await create(free, topic)
        for _ in range(6):
            await produce(free, topic, SAVED // 4)
        await set_quota(free, "bound", "consumer_byte_rate", RATE)
        size, throttle_ms = await fetch(bound, topic)
        assert SAVED // 2 < size <= SAVED, "no more than is saved is read at once"
        assert throttle_ms == 0
        size, throttle_ms = await fetch(bound, topic)
        assert size == 0 and throttle_ms > 1_000
        bound.close()
        again = await connect(address, "bound")
        _, throttle_ms = await fetch(again, topic)
        assert throttle_ms > 1_000, "a new connection does not help"
        assert (await fetch(free, topic))[1] == 0

    with Broker() as broker:
        run(check(broker.bootstrap))


def test_a_wait_begins_no_session_and_loses_none(topic: str) -> None:
    async def check(address: str) -> None:
        free, bound = await connect(address, "free"), await connect(address, "bound")
        await create(free, topic)
        await produce(free, topic, SAVED // 2 + RATE // 4)
        await set_quota(free, "bound", "consumer_byte_rate", RATE)
        begun = await fetch_in_session(bound, topic, (0, 0))
        session_id = begun.session_id
        size = len(begun.responses[0].partitions[0].records or b"")
        assert session_id != 0 and size >= SAVED // 2 and begun.throttle_time_ms == 0

        # Twice that is half a second more than may be had at once.
        waits = await fetch_in_session(await connect(address, "bound"), topic, (0, 0))
        assert 0 < waits.throttle_time_ms <= 520
        assert (waits.session_id, waits.responses) == (0, [])

        answers = []
        for epoch in range(1, 10):
            answers.append(await fetch_in_session(bound, topic, (session_id, epoch)))
            if not answers[-1].throttle_time_ms:
                break
        *waiting, last = answers
        assert waiting
        assert all((each.session_id, each.responses) == (session_id, []) for each in waiting)
        assert len(last.responses[0].partitions[0].records or b"") == size

    with Broker() as broker:
        run(check(broker.bootstrap))


@pytest.mark.parametrize("library", ["confluent-kafka", "kafka-python"])
def test_stock_consumers_read_all_of_it_in_the_time_that_it_takes(topic: str, library: str) -> None:
    rate, count = 400_000, 500
    value = bytes(10_000)  # 5 MB, of which 4 MB may be read at once.
    with Broker() as broker:
        address = broker.bootstrap

        async def prepare() -> None:
            await set_quota(await connect(address, "admin"), "bound", "consumer_byte_rate", rate)

        run(prepare())
        producer = Producer({"bootstrap.servers": address})
        for number in range(count):
            producer.produce(topic, value, b"%d" % number)
        assert producer.flush(30) == 0
        began = time.monotonic()
        keys = read_keys(library, address, topic, count)
        elapsed_s = time.monotonic() - began
    assert keys == [b"%d" % number for number in range(count)]
    assert elapsed_s >= (count * len(value) - 10 * rate) / rate * 0.9


def read_keys(library: str, address: str, topic: str, count: int) -> list[bytes | None]:
    if library == "confluent-kafka":
        return read_keys_with_confluent(address, topic, count)
    consumer = KafkaConsumer(
        bootstrap_servers=address, client_id="bound", consumer_timeout_ms=20_000, group_id=None
    )
    consumer.assign([KafkaTopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    keys = [message.key for _, message in zip(range(count), consumer, strict=False)]
    consumer.close()
    return keys


def read_keys_with_confluent(address: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": address, "client.id": "bound", "group.id": "none"})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    keys: list[bytes | None] = []
    while len(keys) < count:
        message = consumer.poll(20)
        assert message is not None and message.error() is None
        keys.append(message.key())
    consumer.close()
    return keys


def test_a_client_that_keeps_the_broker_busy_waits(topic: str) -> None:
    async def check(address: str) -> None:
        free, bound = await connect(address, "free"), await connect(address, "bound")
        await set_quota(free, "bound", "request_percentage", 0.001)
        throttle_ms = 0
        for _ in range(200):
            answer = await bound.request(MetadataRequest(topics=[]), MetadataResponse)
            throttle_ms = answer.throttle_time_ms
            if throttle_ms:
                break
        assert 0 < throttle_ms <= 1_000
        assert await metadata_seconds(bound) >= throttle_ms / 1000 - 0.05

    with Broker() as broker:
        run(check(broker.bootstrap))


@pytest.mark.parametrize("kills", [True, False])
def test_quotas_survive_a_restart(start_broker: StartBroker, kills: bool) -> None:
    broker = start_broker()

    async def change() -> None:
        connection = await connect(broker.bootstrap, "admin")
        await set_quota(connection, None, "producer_byte_rate", RATE)
        await set_quota(connection, "etl", "request_percentage", 12.5)

    async def check() -> None:
        connection = await connect(broker.bootstrap, "admin")
        answer = await connection.request(
            describing.DescribeClientQuotasRequest(), describing.DescribeClientQuotasResponse
        )
        found = {
            entry.entity[0].entity_name: {value.key: value.value for value in entry.values}
            for entry in answer.entries or ()
        }
        assert found == {None: {"producer_byte_rate": RATE}, "etl": {"request_percentage": 12.5}}

    run(change())
    if kills:
        broker.restart()
    else:
        assert broker.stop() == 0
        broker.start()
    run(check())
