"""Readers go on while a broker recovers, whatever its life before ended on."""

from __future__ import annotations

import time
from pathlib import Path

from node_cases import TOPIC, WAIT_S, Client, ObedientDisk, produce_request, start_node, until

from semel.journal.writer import JournalWriter
from semel.server.node import Node
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from semel.wire.messages.produce import ProduceResponse
from semel.wire.records import read_records


def let_the_journal_fail(node: Node, disk: ObedientDisk) -> None:
    """Until its writer has failed, without a turn of the loop: the node does not know yet."""
    journal = node.life.journal
    assert isinstance(journal, JournalWriter)
    disk.fails = True
    Client(node).send(produce_request(b"lost"), 9)
    deadline = time.monotonic() + WAIT_S
    while journal.failure is None:
        assert time.monotonic() < deadline, "the journal did not fail"
        time.sleep(0.001)


async def test_readers_are_answered_although_the_life_before_is_torn(tmp_path: Path) -> None:
    disk = ObedientDisk()
    node = await start_node(tmp_path, disk)
    await Client(node).create_topic()
    assert await Client(node).produce(b"kept") == 0
    let_the_journal_fail(node, disk)
    # This one is applied, and the journal does not take it: nothing more may be written in this life.
    writer = Client(node)
    writer.send(produce_request(b"torn"), 9)
    refused = writer.answer(produce_request(b"torn"), 9, ProduceResponse)
    assert refused.responses[0].partition_responses[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    await until(lambda: node.life.is_over, "the end of the torn life")

    # The disk still fails, so the recovery is not over.
    metadata = await Client(node).ask(
        MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)]), 9, MetadataResponse
    )
    assert [broker.node_id for broker in metadata.brokers] == [1]
    assert [(topic.name, len(topic.partitions)) for topic in metadata.topics] == [(TOPIC, 1)]
    wanted = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    fetched = await Client(node).ask(
        FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1 << 20,
            topics=[FetchTopic(topic=TOPIC, partitions=[wanted])],
        ),
        11,
        FetchResponse,
    )
    records = bytes(fetched.responses[0].partitions[0].records)
    assert [bytes(record.value) for record in read_records(records)] == [b"kept"]
    assert await Client(node).produce(b"too early") == ErrorCode.KAFKA_STORAGE_ERROR

    over = node.life
    disk.fails = False
    await until(lambda: node.life is not over, "the next life")
    assert await Client(node).produce(b"later") == 0
    assert node.life.broker.catalog.by_name[TOPIC].partitions[0].log.end_offset == 2
    await node.stop()
