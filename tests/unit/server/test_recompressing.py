"""Batches that a topic keeps in another codec are recompressed beside the loop, and stay in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_cases import TOPIC, Client, ObedientDisk, produce_request, start_node, until

from semel.server.node import Node
from semel.wire.batch import read_header
from semel.wire.compression import Codec
from semel.wire.frames import decode_response
from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from semel.wire.messages.produce import PartitionProduceResponse, ProduceRequest, ProduceResponse

VERSION = 9


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return await start_node(tmp_path, ObedientDisk(), compression_type="zstd")


def answers(client: Client) -> list[PartitionProduceResponse]:
    """All that have come since the last request was sent."""
    found = []
    written = memoryview(bytes(client.wire.written))
    while written:
        size = int.from_bytes(written[:4])
        _, response = decode_response(written[4 : 4 + size], ProduceRequest.API_KEY, VERSION, ProduceResponse)
        found.append(response.responses[0].partition_responses[0])
        written = written[4 + size :]
    return found


async def test_a_batch_is_recompressed_beside_the_loop_and_later_ones_do_not_pass_it(node: Node) -> None:
    client, other = Client(node), Client(node)
    await client.create_topic()
    log = node.life.broker.catalog.by_name[TOPIC].partitions[0].log
    client.send(produce_request(b"first" * 100_000), VERSION)
    client.send(produce_request(b"second", Codec.ZSTD), VERSION)
    assert log.end_offset == 0, "it was decided at once, on the loop"
    await other.ask(ApiVersionsRequest(), 0, ApiVersionsResponse)
    await until(lambda: len(answers(client)) == 2, "two answers")
    assert [(each.error_code, each.base_offset) for each in answers(client)] == [(0, 0), (0, 1)]
    view = node.life.store.partition(node.life.broker.catalog.by_name[TOPIC].topic_id, 0)
    region = view.read(0, 1 << 20, log.end_offset)
    assert region is not None and read_header(region.load()).codec == Codec.ZSTD
    await node.stop()


async def test_whoever_hangs_up_while_a_batch_is_recompressed_has_written_nothing(node: Node) -> None:
    client, other = Client(node), Client(node)
    await client.create_topic()
    client.send(produce_request(b"lost" * 100_000), VERSION)
    client.hang_up()
    assert await other.produce(b"kept") == 0
    assert node.life.broker.catalog.by_name[TOPIC].partitions[0].log.end_offset == 1
    await node.stop()
