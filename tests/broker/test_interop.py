"""Stock clients do with this broker what they do with any Kafka: each claim for each client and loop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from client_aiokafka import AioKafka
from client_confluent import Confluent
from client_java import Java
from client_kafka_python import KafkaPython
from interop_cases import BASE_MS, CODECS, Record, StockClient, at_offsets, sample_records

CLIENTS = ("confluent", "kafka-python", "aiokafka", "java")


@pytest.fixture(scope="module")
def clients(bootstrap: str) -> Iterator[dict[str, StockClient]]:
    """Every client that can run here, by name."""
    made: dict[str, StockClient] = {
        "confluent": Confluent(bootstrap),
        "kafka-python": KafkaPython(bootstrap),
        "aiokafka": AioKafka(bootstrap),
    }
    if Java.missing() is None:
        made["java"] = Java(bootstrap)
    yield made
    for client in made.values():
        client.close()


def chosen(clients: dict[str, StockClient], name: str) -> StockClient:
    if name not in clients:
        pytest.skip(f"no Java client: {Java.missing()}")
    return clients[name]


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, clients: dict[str, StockClient]) -> StockClient:
    return chosen(clients, request.param)


@pytest.fixture(params=CLIENTS)
def other(request: pytest.FixtureRequest, clients: dict[str, StockClient]) -> StockClient:
    """A second client, to read what the first wrote."""
    return chosen(clients, request.param)


@pytest.mark.parametrize("codec", CODECS)
def test_what_one_client_wrote_every_client_reads(
    client: StockClient, other: StockClient, codec: str, topic: str
) -> None:
    client.create_topic(topic)
    records = sample_records(60)
    assert client.produce(topic, records, codec) == list(range(60))
    assert other.consume(topic, 0, 0, 60) == at_offsets(records)
    assert other.consume(topic, 0, 37, 5) == at_offsets(records[37:42], 37)


@pytest.mark.parametrize("kept", ("uncompressed", "gzip", "snappy", "lz4", "zstd"))
def test_every_client_reads_what_the_topic_keeps_in_a_codec_of_its_own(
    client: StockClient, kept: str, topic: str
) -> None:
    client.create_topic(topic, configs={"compression.type": kept})
    records = sample_records(60)
    sent = "gzip" if kept != "gzip" else "none"
    assert client.produce(topic, records, sent) == list(range(60))
    assert client.consume(topic, 0, 0, 60) == at_offsets(records)


@pytest.mark.parametrize("name", ("confluent", "java"))
def test_nothing_at_all_comes_back_as_nothing(clients: dict[str, StockClient], name: str, topic: str) -> None:
    # The other clients refuse to send it.
    client = chosen(clients, name)
    client.create_topic(topic)
    records = [Record(None, None, BASE_MS), Record(b"k", b"v", BASE_MS + 1, (("null", None), ("", b"")))]
    client.produce(topic, records)
    assert client.consume(topic, 0, 0, 2) == at_offsets(records)


@pytest.mark.parametrize("codec", CODECS)
def test_messages_of_a_megabyte_come_back(client: StockClient, codec: str, topic: str) -> None:
    # Random bytes do not get smaller: with every codec the batch is as large as the broker takes by default.
    client.create_topic(topic)
    dice = random.Random(1)
    records = [Record(b"large", dice.randbytes(1_000_000), BASE_MS + n) for n in range(3)]
    client.produce(topic, records, codec)
    assert client.consume(topic, 0, 0, 3) == at_offsets(records)


def test_every_partition_keeps_its_own_order(client: StockClient, topic: str) -> None:
    client.create_topic(topic, partitions=5)
    records = [Record(b"%d" % n, b"%d" % (n * n), BASE_MS + n, partition=n % 5) for n in range(200)]
    client.produce(topic, records, "lz4")
    for partition in range(5):
        assert client.watermarks(topic, partition) == (0, 40)
        assert client.consume(topic, partition, 0, 40) == at_offsets(records[partition::5])


def test_the_broker_s_clock_stamps_where_the_topic_says_so(client: StockClient, topic: str) -> None:
    client.create_topic(topic, configs={"message.timestamp.type": "LogAppendTime"})
    before_ms = int(time.time() * 1000)
    records = sample_records(20)
    client.produce(topic, records, "gzip")
    after_ms = int(time.time() * 1000)
    stored = client.consume(topic, 0, 0, 20)
    assert all(item.append_time for item in stored)
    assert all(before_ms <= item.record.timestamp_ms <= after_ms for item in stored)
    unstamped = [replace(item.record, timestamp_ms=records[n].timestamp_ms) for n, item in enumerate(stored)]
    assert unstamped == records


@pytest.mark.parametrize("codec", ("none", "zstd"))
def test_offsets_are_found_by_time(client: StockClient, codec: str, topic: str) -> None:
    client.create_topic(topic)
    records = [Record(b"%d" % n, b"v" * 100, BASE_MS + 10 * n) for n in range(50)]
    client.produce(topic, records, codec)
    assert client.offset_for_time(topic, 0, BASE_MS - 1) == 0
    assert client.offset_for_time(topic, 0, BASE_MS + 200) == 20
    assert client.offset_for_time(topic, 0, BASE_MS + 201) == 21
    assert client.offset_for_time(topic, 0, BASE_MS + 490) == 49
    assert client.offset_for_time(topic, 0, BASE_MS + 491) is None


def test_deleted_records_are_gone_and_the_rest_stays(client: StockClient, topic: str) -> None:
    client.create_topic(topic)
    records = sample_records(30)
    client.produce(topic, records)
    client.delete_records(topic, 0, 12)
    assert client.watermarks(topic, 0) == (12, 30)
    assert client.consume(topic, 0, 12, 18) == at_offsets(records[12:], 12)


def test_topics_are_created_configured_and_deleted(client: StockClient, topic: str) -> None:
    client.create_topic(topic, partitions=3, configs={"retention.ms": "123456"})
    assert topic in client.topics()
    configs = client.configs(topic)
    assert configs["retention.ms"] == "123456"
    assert configs["cleanup.policy"] == "delete"
    client.alter_config(topic, "retention.ms", "654321")
    assert client.configs(topic)["retention.ms"] == "654321"
    client.delete_topic(topic)
    assert topic not in client.topics()
