"""A large request cannot keep the event loop: only Produce may be large, and none may name too much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from struct import pack

import pytest
from node_cases import Client

from semel.broker.decision import Endpoint
from semel.errors import ProtocolError
from semel.server.clock import SystemClock
from semel.server.connection import Connection, Slot
from semel.server.intake import Intake
from semel.server.large_requests import COUNTED_FRAME_BYTES, PLAIN_FRAME_BYTES, most_elements
from semel.server.node import Node
from semel.server.settings import Settings
from semel.wire.apis import ApiKey
from semel.wire.counting import check_elements
from semel.wire.frames import Message, decode_request_header
from semel.wire.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from semel.wire.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import MAX_UNKNOWN_TAGS, DecodeError, Splices

MAX_FRAME_BYTES = 100 * 1024 * 1024
MAX_PARTITIONS = 20_000
LIMIT = most_elements(MAX_PARTITIONS)


class Nobody:
    def handle(self, slot: Slot, body: memoryview, pos: int) -> None: ...

    def opened(self, connection: Connection) -> bool:
        return True

    def closed(self, connection: Connection) -> None: ...


class Deaf(asyncio.Transport):
    """A transport that remembers only whether it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def abort(self) -> None:
        self.is_cut = True


def received(*pieces: bytes) -> tuple[Deaf, Intake]:
    transport, intake = Deaf(), Intake(MAX_FRAME_BYTES, MAX_FRAME_BYTES)
    connection = Connection(Nobody(), intake, Endpoint("127.0.0.1", 9092), lambda: 0)
    connection.connection_made(transport)
    for piece in pieces:
        connection.get_buffer(-1)[: len(piece)] = piece
        connection.buffer_updated(len(piece))
    return transport, intake


def start_of(size: int, api_key: int) -> bytes:
    return pack(">ihh", size, api_key, 0)


@pytest.mark.parametrize("api_key", [ApiKey.FETCH, ApiKey.METADATA, ApiKey.JOIN_GROUP, 999])
def test_a_large_request_other_than_produce_is_cut_off_before_room_is_made(api_key: int) -> None:
    transport, intake = received(start_of(PLAIN_FRAME_BYTES + 1, api_key))
    assert transport.is_cut
    assert intake.used_bytes == 0


@pytest.mark.parametrize(
    ("size", "api_key"), [(PLAIN_FRAME_BYTES, ApiKey.FETCH), (MAX_FRAME_BYTES, ApiKey.PRODUCE)]
)
def test_a_request_within_its_limit_is_read(size: int, api_key: int) -> None:
    transport, intake = received(start_of(size, api_key))
    assert not transport.is_cut
    assert intake.used_bytes > 0


def test_the_api_key_is_waited_for() -> None:
    start = start_of(PLAIN_FRAME_BYTES + 1, ApiKey.FETCH)
    for cut in range(4, 6):
        assert not received(start[:cut])[0].is_cut
        assert received(start[:cut], start[cut:])[0].is_cut


def encoded(request: Message, version: int) -> memoryview:
    out = bytearray()
    request.encode(out, version, [])
    return memoryview(out)


def every_partition_in_its_own_topic(count: int) -> list[FetchTopic]:
    return [FetchTopic(topic=f"topic-{n:05}", partitions=[FetchPartition()]) for n in range(count)]


HONEST = {
    "a fetch of all partitions": (FetchRequest(topics=every_partition_in_its_own_topic(MAX_PARTITIONS)), 12),
    "the metadata of all topics": (
        MetadataRequest(topics=[MetadataRequestTopic(name=f"topic-{n:05}") for n in range(MAX_PARTITIONS)]),
        12,
    ),
    "a creation of 5,000 topics with configs": (
        CreateTopicsRequest(
            topics=[
                CreatableTopic(
                    name=f"topic-{n:05}",
                    num_partitions=1,
                    configs=[CreatableTopicConfig(name="retention.ms", value="1000")] * 2,
                )
                for n in range(5_000)
            ]
        ),
        7,
    ),
    "a join with much to say": (
        JoinGroupRequest(protocols=[JoinGroupRequestProtocol(name="range", metadata=bytes(3_000_000))]),
        9,
    ),
    "a batch of 50 MB": (
        ProduceRequest(
            topic_data=[
                TopicProduceData(name="t", partition_data=[PartitionProduceData(0, bytes(50_000_000))])
            ]
        ),
        3,
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_large_request_that_means_it_passes(name: str) -> None:
    request, version = HONEST[name]
    out = bytearray()
    splices: Splices = []
    request.encode(out, version, splices)
    body = memoryview(b"".join([out, *(bytes(records) for _, records in splices)]))  # type: ignore[call-overload]
    assert len(body) > COUNTED_FRAME_BYTES
    assert check_elements(body, 0, request.API_KEY, version, LIMIT) == len(body)


def test_a_broker_of_more_partitions_takes_larger_requests() -> None:
    body = encoded(FetchRequest(topics=every_partition_in_its_own_topic(2 * MAX_PARTITIONS)), 12)
    with pytest.raises(ProtocolError, match=r"a Fetch request of \d+ bytes names more than 50000 things"):
        check_elements(body, 0, ApiKey.FETCH, 12, LIMIT)
    check_elements(body, 0, ApiKey.FETCH, 12, most_elements(2 * MAX_PARTITIONS))


def junk_topics() -> bytes:
    # Topics with an empty name, no partitions and no tags.
    count = PLAIN_FRAME_BYTES // 3
    return b"\0" + bytes(6) + _uvarint(count + 1) + b"\1\1\0" * count


def junk_partitions() -> bytes:
    # One topic, partitions without records or tags.
    count = PLAIN_FRAME_BYTES // 6
    return b"\0" + bytes(6) + b"\2\1" + _uvarint(count + 1) + bytes(6) * count


def junk_tags() -> bytes:
    # No topics, and then tagged fields without content, under ascending tags.
    tags = b"".join(_uvarint(tag) + b"\0" for tag in range(100_000))
    return b"\0" + bytes(6) + b"\1" + _uvarint(100_000) + tags + bytes(PLAIN_FRAME_BYTES - len(tags))


def junk_keys() -> bytes:
    # FindCoordinator for groups without a name.
    return b"\0" + _uvarint(PLAIN_FRAME_BYTES + 1) + b"\1" * PLAIN_FRAME_BYTES + b"\0"


def junk_names() -> bytes:
    # DescribeConfigs of one topic without a name: configs without a name.
    return b"\2\2\1" + _uvarint(PLAIN_FRAME_BYTES + 1) + b"\1" * PLAIN_FRAME_BYTES + bytes(4)


@pytest.mark.parametrize(
    ("junk", "api_key", "version"),
    [
        (junk_topics, ApiKey.PRODUCE, 9),
        (junk_partitions, ApiKey.PRODUCE, 9),
        (junk_tags, ApiKey.PRODUCE, 9),
        (junk_keys, ApiKey.FIND_COORDINATOR, 4),
        (junk_names, ApiKey.DESCRIBE_CONFIGS, 4),
    ],
)
def test_junk_does_not_keep_the_loop(junk: Callable[[], bytes], api_key: ApiKey, version: int) -> None:
    body = memoryview(junk())
    began = time.process_time()
    with pytest.raises(ProtocolError):
        check_elements(body, 0, api_key, version, LIMIT)
    assert time.process_time() - began < 0.2


def test_a_header_full_of_tags_is_refused() -> None:
    few, many = MAX_UNKNOWN_TAGS, MAX_UNKNOWN_TAGS + 1
    for count in (few, many):
        tags = b"".join(_uvarint(tag) + b"\0" for tag in range(count))
        header = memoryview(pack(">hhih", ApiKey.PRODUCE, 9, 1, -1) + _uvarint(count) + tags)
        if count == few:
            assert decode_request_header(header)[1] == len(header)
        else:
            with pytest.raises(DecodeError, match="tagged fields"):
                decode_request_header(header)


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


async def test_a_node_cuts_off_who_names_too_much_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(Settings.load(), SystemClock(), None, lambda: None)
    await node.start()
    client = Client(node)
    few = FindCoordinatorRequest(coordinator_keys=[f"group-{n:05}" for n in range(10_000)])
    assert len((await client.ask(few, 4, FindCoordinatorResponse)).coordinators) == 10_000
    client.send(FindCoordinatorRequest(coordinator_keys=[""] * (COUNTED_FRAME_BYTES + LIMIT)), 4)
    assert client.wire.is_cut
    assert f"names more than {LIMIT} things" in caplog.text
    await node.stop()
