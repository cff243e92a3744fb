"""A large request cannot keep the event loop: only Produce may be large, and only by its batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from struct import pack

import pytest

from semel.broker.decision import Endpoint
from semel.errors import ProtocolError
from semel.server.connection import Connection, Slot
from semel.server.intake import Intake
from semel.server.large_requests import MAX_PRODUCED_PARTITIONS, PLAIN_FRAME_BYTES, check_large_produce
from semel.wire.apis import ApiKey
from semel.wire.frames import decode_request_header
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import MAX_UNKNOWN_TAGS, DecodeError

MAX_FRAME_BYTES = 100 * 1024 * 1024
VERSIONS = [3, 8, 9, 12, 13]
A_SECOND_OF_JUNK = 20 * 1024 * 1024


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


def encoded(request: ProduceRequest, version: int) -> memoryview:
    out = bytearray()
    request.encode(out, version, [])
    return memoryview(out)


def produce_of(partitions: int, topics: int = 1, records: bytes | None = b"x" * 100) -> ProduceRequest:
    parts = [PartitionProduceData(index, records) for index in range(partitions)]
    return ProduceRequest(
        "id", -1, 1000, [TopicProduceData(name=f"t{n}", partition_data=parts) for n in range(topics)]
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "request_", [produce_of(3, 2), produce_of(2, 2, None), ProduceRequest(topic_data=[])]
)
def test_a_produce_with_few_partitions_passes(version: int, request_: ProduceRequest) -> None:
    check_large_produce(encoded(request_, version), 0, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("partitions", "topics"), [(MAX_PRODUCED_PARTITIONS, 1), (0, MAX_PRODUCED_PARTITIONS + 1), (101, 200)]
)
def test_a_produce_with_too_many_topics_or_partitions_is_refused(
    version: int, partitions: int, topics: int
) -> None:
    body = encoded(produce_of(partitions, topics, b""), version)
    with pytest.raises(ProtocolError, match="names"):
        check_large_produce(body, 0, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_produce_that_ends_early_is_refused(version: int) -> None:
    body = encoded(produce_of(2), version)
    for cut in range(len(body)):
        with pytest.raises(DecodeError):
            check_large_produce(body[:cut], 0, version)
            ProduceRequest.decode(body[:cut], 0, version)


def junk_topics(size: int) -> bytes:
    # A topic with an empty name, no partitions and no tags.
    count = size // 3
    head = b"\0" + bytes(6)
    return head + _uvarint(count + 1) + b"\1\1\0" * count


def junk_tags(size: int) -> bytes:
    # No topics, and then tagged fields without content, under ascending tags.
    tags = b"".join(_uvarint(tag) + b"\0" for tag in range(100_000))
    return b"\0" + bytes(6) + b"\1" + _uvarint(100_000) + tags + bytes(size - len(tags))


@pytest.mark.parametrize("junk", [junk_topics, junk_tags])
def test_junk_does_not_keep_the_loop(junk: Callable[[int], bytes]) -> None:
    body = memoryview(junk(A_SECOND_OF_JUNK))
    began = time.process_time()
    with pytest.raises(ProtocolError):
        check_large_produce(body, 0, 9)
        ProduceRequest.decode(body, 0, 9)
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
