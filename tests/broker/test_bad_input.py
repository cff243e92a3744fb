"""Bad input gets a clear answer or a closed connection, and nobody else notices.

One broker serves all the tests here. After each of them it is alive, has grown by less than `GROWTH_BYTES`,
has met no bug, and a bystander that was at work all the while has seen neither an error nor a long wait.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import time
import zlib
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from struct import pack
from typing import Final

import pytest
from broker_process import BrokerProcess
from raw_client import (
    FETCH_VERSION,
    METADATA_VERSION,
    Bystander,
    RawClient,
    create_topic,
    encoded,
    end_offset,
    fetch_request,
    produce,
)

from semel.wire import messages
from semel.wire.apis import APIS, ApiKey
from semel.wire.batch import write_crc
from semel.wire.compression import Codec, compress
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from semel.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import EncodeError
from semel.wire.records import Record, build_batch

MIB: Final = 1 << 20
GROWTH_BYTES: Final = 250 * MIB
"""By how much the broker may grow under any of this."""
PATIENCE_S: Final = 4.0
"""How long the bystander may wait for three answers, on a machine that is busy with the test as well."""
MAX_REQUEST_BYTES: Final = 100 * MIB
CONNECTIONS: Final = 10_000
MUTANTS: Final = int(os.environ.get("TEST_MUTANTS", "5000"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("bad-input") / "broker").start()
    yield broker
    broker.kill()


@pytest.fixture(scope="module")
def bystander(target: BrokerProcess) -> Iterator[Bystander]:
    made = Bystander(target.port)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def nobody_else_notices(target: BrokerProcess, bystander: Bystander) -> Iterator[None]:
    bystander.check()
    bystander.slowest_s = 0.0
    before = target.rss_bytes
    logged = len(target.log)
    yield
    bystander.check()
    assert target.is_alive
    assert "this is a bug" not in target.log[logged:], target.log[logged:]
    grown = target.rss_bytes - before
    assert grown < GROWTH_BYTES, f"the broker grew by {grown / MIB:.0f} MiB"
    assert bystander.slowest_s < PATIENCE_S, f"the bystander waited {bystander.slowest_s:.1f} s"


@pytest.fixture
def client(target: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(target.port) as made:
        yield made


def assert_refused(target: BrokerProcess, client: RawClient, *words: str) -> None:
    """The connection is closed, and the log says whose and why."""
    assert client.is_closed(), "the broker answered"
    lines = [line for line in target.log.splitlines() if client.peer in line]
    assert lines, f"nothing in the log about {client.peer}"
    for word in words:
        assert word in lines[-1], lines[-1]


def header(api_key: int, version: int, client_id: bytes = b"raw") -> bytes:
    """A request header as bytes: in a flexible version tagged fields must follow."""
    return pack(">hhih", api_key, version, 7, len(client_id)) + client_id


# Frames.


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 7, MAX_REQUEST_BYTES + 1, 2**31 - 1])
def test_a_size_out_of_bounds_ends_the_connection(
    target: BrokerProcess, client: RawClient, size: int
) -> None:
    client.send(pack(">i", size) + bytes(64))
    assert_refused(target, client, f"a request of {size} bytes was announced", "socket.request.max.bytes")


def test_an_announced_size_is_not_believed(target: BrokerProcess) -> None:
    before = target.rss_bytes
    clients = [RawClient(target.port) for _ in range(50)]
    for client in clients:
        client.send(pack(">i", MAX_REQUEST_BYTES) + bytes(1000))
    with RawClient(target.port) as other:
        other.ask(MetadataRequest(topics=[]), METADATA_VERSION, MetadataResponse)
    assert target.rss_bytes - before < 150 * MIB, "room was made for what was only announced"
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 11, 20])
def test_a_request_that_is_cut_short_has_no_effect(target: BrokerProcess, cut: int) -> None:
    topic = CreatableTopic(name=f"cut-{cut}", num_partitions=1, replication_factor=1)
    frame = encoded(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 5)
    with RawClient(target.port) as client:
        client.send(frame[:-cut])
    with RawClient(target.port) as client:
        names = {t.name for t in client.ask(MetadataRequest(topics=None), 9, MetadataResponse).topics}
    assert f"cut-{cut}" not in names


def test_a_request_may_come_byte_by_byte(client: RawClient) -> None:
    for byte in encoded(MetadataRequest(topics=None), METADATA_VERSION) * 3:
        client.send(bytes((byte,)))
    assert all(client.read_frame() for _ in range(3))


def test_many_requests_may_come_at_once(client: RawClient) -> None:
    client.send(encoded(MetadataRequest(topics=[]), METADATA_VERSION) * 300)
    assert all(client.read_frame() for _ in range(300))


@pytest.mark.parametrize(
    ("greeting", "size"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0x47455420),
        (bytes.fromhex("1603010200010001fc0303") + bytes(500), 0x16030102),
        (b"SSH-2.0-OpenSSH_9.2\r\n", 0x5353482D),
    ],
    ids=["http", "tls", "ssh"],
)
def test_other_protocols_are_turned_away(
    target: BrokerProcess, client: RawClient, greeting: bytes, size: int
) -> None:
    client.send(greeting)
    assert_refused(target, client, str(size))


# Headers, keys and versions.


@pytest.mark.parametrize("key", [-1, 4, 999, 32767])
def test_an_unknown_key_ends_the_connection(target: BrokerProcess, client: RawClient, key: int) -> None:
    client.send_frame(header(key, 0))
    assert_refused(target, client, str(key))


@pytest.mark.parametrize("version", [-1, 2, 14, 32767])
def test_an_unknown_version_ends_the_connection(
    target: BrokerProcess, client: RawClient, version: int
) -> None:
    client.send_frame(header(ApiKey.PRODUCE, version) + bytes(40))
    assert_refused(target, client, "Produce", str(version))


@pytest.mark.parametrize("version", [5, 99, 32767])
def test_api_versions_that_are_too_new_are_answered_in_version_0(client: RawClient, version: int) -> None:
    client.send_frame(header(ApiKey.API_VERSIONS, version) + b"\0\x05next\x041.0\0")
    frame = memoryview(client.read_frame())
    correlation_id, answer = decode_response(frame, ApiKey.API_VERSIONS, 0, ApiVersionsResponse)
    assert correlation_id == 7
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert ApiKey.API_VERSIONS in {item.api_key for item in answer.api_keys}
    again = client.ask(ApiVersionsRequest(), 0, ApiVersionsResponse)
    assert again.error_code == 0, "the connection goes on"


@pytest.mark.parametrize(
    "body",
    [
        pack(">hhih", ApiKey.METADATA, 1, 7, 30000) + b"short",
        pack(">hhih", ApiKey.METADATA, 1, 7, -2) + bytes(8),
        pack(">hhih", ApiKey.METADATA, 1, 7, 4) + b"\xff\xfe\xfd\xfc" + bytes(4),
        header(ApiKey.METADATA, METADATA_VERSION) + b"\xff" * 11,
        header(ApiKey.METADATA, METADATA_VERSION) + b"\x80" * 100,
    ],
    ids=["too long a client id", "negative client id", "not utf-8", "endless tag count", "endless varint"],
)
def test_a_broken_header_ends_the_connection(target: BrokerProcess, client: RawClient, body: bytes) -> None:
    client.send_frame(body)
    assert_refused(target, client)


def test_a_client_id_cannot_write_into_the_log(target: BrokerProcess, client: RawClient) -> None:
    client.send_frame(header(ApiKey.PRODUCE, 99, b"me\n2026-01-01 ERROR forged\x1b[2J") + bytes(40))
    assert_refused(target, client)
    assert "\n2026-01-01 ERROR forged" not in target.log
    assert "\x1b[2J" not in target.log


# Bodies.


@pytest.mark.parametrize("count", [2**31 - 1, 10**6, -2, -(2**31)])
@pytest.mark.parametrize(
    ("key", "version", "prefix"),
    [
        (ApiKey.METADATA, 1, b""),
        (ApiKey.CREATE_TOPICS, 2, b""),
        (ApiKey.PRODUCE, 3, pack(">hhi", -1, -1, 1000)),
        (ApiKey.FETCH, 4, pack(">iiiib", -1, 0, 1, 1000, 0)),
        (ApiKey.LIST_OFFSETS, 1, pack(">i", -1)),
        (ApiKey.DELETE_RECORDS, 0, b""),
    ],
)
def test_an_array_of_billions_is_not_made_room_for(
    target: BrokerProcess, client: RawClient, key: int, version: int, prefix: bytes, count: int
) -> None:
    client.send_frame(header(key, version) + prefix + pack(">i", count) + bytes(100))
    assert_refused(target, client)


@pytest.mark.parametrize(
    "tail",
    [
        b"\xff\xff\xff\xff\x0f" + bytes(50),
        b"\xff" * 50,
        b"\x02" + b"\xff\xff\xff\xff\x0f" + bytes(30),
        b"\x00\x00\x00\x01" + b"\xff\xff\xff\xff\x07" + bytes(20),
        b"\x01\x00\x00\x00\x02\x01\x01a\x00\x01b",
        b"\x01\x00\x00\x00\x02\x05\x01a\x02\x01b",
    ],
    ids=["count", "varint", "string", "tags by the billion", "a tag twice", "tags out of order"],
)
def test_a_flexible_body_that_lies_ends_the_connection(
    target: BrokerProcess, client: RawClient, tail: bytes
) -> None:
    client.send_frame(header(ApiKey.METADATA, METADATA_VERSION) + b"\0" + tail)
    assert_refused(target, client)


BAD_NAMES = ["", ".", "..", "/", "a/b", "../../etc/passwd", "nul\0", "a" * 250, "spa ce", "ü", "new\nline"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_topic_name_that_breaks_the_rules_is_refused(client: RawClient, name: str) -> None:
    topic = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    answer = client.ask(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 5, CreateTopicsResponse)
    assert answer.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=name)], allow_auto_topic_creation=True)
    (told,) = client.ask(asked, METADATA_VERSION, MetadataResponse).topics
    assert told.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_more_partitions_than_allowed_are_refused(client: RawClient) -> None:
    topic = CreatableTopic(name="huge", num_partitions=1_000_000, replication_factor=1)
    answer = client.ask(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 5, CreateTopicsResponse)
    assert answer.topics[0].error_code == ErrorCode.INVALID_PARTITIONS


# Batches.


def good_batch(value: bytes = b"value", **options: int) -> bytearray:
    return build_batch([Record(b"key", value, int(time.time() * 1000))], **options)


def forged(at: int, content: bytes, *, seal: bool = True) -> bytes:
    """A batch with some bytes changed; with `seal`, the checksum says that they are right."""
    batch = good_batch()
    batch[at : at + len(content)] = content
    if seal:
        write_crc(batch)
    return bytes(batch)


LENGTH_AT, MAGIC_AT, CRC_AT, ATTRIBUTES_AT, LAST_DELTA_AT, COUNT_AT = 8, 16, 17, 21, 23, 57
BAD_BATCHES = {
    "wrong checksum": forged(CRC_AT, b"\1\2\3\4", seal=False),
    "changed value": bytes(good_batch()[:-2] + b"xx"),
    "magic 0": forged(MAGIC_AT, b"\0"),
    "magic 1": forged(MAGIC_AT, b"\1"),
    "magic 9": forged(MAGIC_AT, b"\x09"),
    "count 0": forged(COUNT_AT, pack(">i", 0)),
    "count 2": forged(COUNT_AT, pack(">i", 2)),
    "count in billions": forged(LAST_DELTA_AT, pack(">i", 2**31 - 2))[:COUNT_AT] + pack(">i", 2**31 - 1),
    "negative count": forged(COUNT_AT, pack(">i", -1)),
    "last delta 5": forged(LAST_DELTA_AT, pack(">i", 5)),
    "negative last delta": forged(LAST_DELTA_AT, pack(">i", -1)),
    "length too long": forged(LENGTH_AT, pack(">i", 5000), seal=False),
    "length too short": forged(LENGTH_AT, pack(">i", 30), seal=False),
    "negative length": forged(LENGTH_AT, pack(">i", -1), seal=False),
    "huge length": forged(LENGTH_AT, pack(">i", 2**31 - 1), seal=False),
    "control": forged(ATTRIBUTES_AT, pack(">h", 0x20)),
    "transactional": forged(ATTRIBUTES_AT, pack(">h", 0x10)),
    "control and transactional": forged(ATTRIBUTES_AT, pack(">h", 0x30)),
    "append time": forged(ATTRIBUTES_AT, pack(">h", 0x08)),
    "delete horizon": forged(ATTRIBUTES_AT, pack(">h", 0x40)),
    "codec 7": forged(ATTRIBUTES_AT, pack(">h", 7)),
    "cut in the header": bytes(good_batch()[:40]),
    "cut in the records": bytes(good_batch()[:-3]),
    "nothing": b"",
    "two batches": bytes(good_batch() + good_batch()),
    "trailing bytes": bytes(good_batch() + b"more"),
    "larger than allowed": bytes(good_batch(bytes(1_100_000))),
}


@pytest.fixture(scope="module")
def victim(target: BrokerProcess) -> str:
    """A topic for bad batches."""
    with RawClient(target.port) as client:
        create_topic(client, "victim")
        create_topic(client, "victim-compacted", **{"cleanup.policy": "compact"})
    return "victim"


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("acks", [-1, 1])
def test_a_bad_batch_is_refused_and_leaves_no_trace(
    client: RawClient, victim: str, name: str, acks: int
) -> None:
    before = end_offset(client, victim)
    code, offset = produce(client, victim, BAD_BATCHES[name], acks)
    assert code != 0 and offset == -1, f"{name}: accepted at {offset}"
    assert ErrorCode(code) not in (ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.KAFKA_STORAGE_ERROR)
    assert end_offset(client, victim) == before
    assert produce(client, victim, bytes(good_batch())) == (0, before), "the connection goes on"


def test_a_bad_batch_does_not_spoil_its_neighbours(client: RawClient, victim: str) -> None:
    create_topic(client, "neighbour")
    assert produce(client, victim, BAD_BATCHES["wrong checksum"])[0] == ErrorCode.CORRUPT_MESSAGE
    assert produce(client, "neighbour", bytes(good_batch())) == (0, 0)


def test_the_log_says_whose_batch_was_refused_and_why_and_not_each_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fresh = BrokerProcess(tmp_path_factory.mktemp("told") / "broker", in_memory=True).start()
    try:
        with RawClient(fresh.port) as client:
            create_topic(client, "victim")
            for name in ("wrong checksum", "changed value", "control", "wrong checksum"):
                assert produce(client, "victim", BAD_BATCHES[name])[0]
        told = [line for line in fresh.log.splitlines() if "refused as" in line]
        assert len(told) == 2, told
        for line, words in zip(told, ("CORRUPT_MESSAGE", "INVALID_RECORD"), strict=True):
            assert words in line and "a batch of 'raw' at 127.0.0.1 for victim-0: " in line
        assert "checksum" in told[0] and "control" in told[1]
    finally:
        fresh.kill()


def compressed_batch(codec: Codec, body: bytes) -> bytes:
    """A batch that says that its body is compressed, and that it holds one record."""
    batch = bytearray(good_batch()[:61] + body)
    batch[LENGTH_AT : LENGTH_AT + 4] = pack(">i", len(batch) - 12)
    batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = pack(">h", codec)
    write_crc(batch)
    assert len(batch) < 1_048_588, f"{codec.name}: {len(batch)}"
    return bytes(batch)


BOMBS = (Codec.GZIP, Codec.ZSTD, Codec.LZ4, Codec.SNAPPY)


def bomb(codec: Codec) -> bytes:
    """As many zeros as a codec gets into less than a megabyte: for most of them far more than the limit.

    What repeats is compressed once and then repeated, so that making it does not keep the bystander waiting.
    """
    zeros = bytes(MIB)
    match codec:
        case Codec.GZIP:
            squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
            start = squeezer.compress(zeros) + squeezer.flush(zlib.Z_FULL_FLUSH)
            again = squeezer.compress(zeros) + squeezer.flush(zlib.Z_FULL_FLUSH)
            body = start + again * (900_000 // len(again))
        case Codec.SNAPPY:
            block = bytes(compress(codec, zeros))
            body = block[:16] + block[16:] * (900_000 // len(block))
        case _:
            frame = bytes(compress(codec, bytes(200 * MIB)))
            body = frame * (900_000 // len(frame))
    return compressed_batch(codec, body)


@pytest.mark.parametrize("codec", BOMBS, ids=lambda codec: codec.name.lower())
def test_a_decompression_bomb_on_a_compacted_topic_is_refused(
    client: RawClient, victim: str, codec: Codec
) -> None:
    code, offset = produce(client, "victim-compacted", bomb(codec))
    assert code in (ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.CORRUPT_MESSAGE)
    assert offset == -1


def test_a_bomb_that_was_stored_does_not_go_off_when_times_are_looked_for(
    client: RawClient, victim: str
) -> None:
    create_topic(client, "stored-bomb")
    assert produce(client, "stored-bomb", bomb(Codec.GZIP))[0] == 0, "batches are not opened without need"
    part = ListOffsetsPartition(partition_index=0, timestamp=1)
    asked = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsTopic(name="stored-bomb", partitions=[part])]
    )
    answer = client.ask(asked, 5, ListOffsetsResponse)
    assert answer.topics[0].partitions[0].offset in (-1, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(40),  # A zstd frame that asks for a window of 2 GB.
        b"\x28\xb5\x2f\xfd",
        b"",
        b"\xff" * 100,
    ],
    ids=["window of 2 GB", "magic only", "empty", "noise"],
)
@pytest.mark.parametrize("codec", BOMBS, ids=lambda codec: codec.name.lower())
def test_damaged_compression_is_refused_where_records_are_looked_at(
    client: RawClient, victim: str, codec: Codec, body: bytes
) -> None:
    code, offset = produce(client, "victim-compacted", compressed_batch(codec, body))
    assert code != 0 and offset == -1


def test_a_record_without_a_key_is_refused_on_a_compacted_topic(client: RawClient, victim: str) -> None:
    batch = bytes(build_batch([Record(None, b"v", 0)]))
    assert produce(client, "victim-compacted", batch)[0] == ErrorCode.INVALID_RECORD


# Too much of everything.


@pytest.fixture
def descriptors() -> None:
    """Room for ten thousand sockets in this process; the broker sees to its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + 1000:
        pytest.skip(f"only {hard} descriptors may be open here (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.usefixtures("descriptors")
def test_ten_thousand_connections_are_held_while_others_work(
    target: BrokerProcess, bystander: Bystander
) -> None:
    sockets = [socket.create_connection(("127.0.0.1", target.port), 30) for _ in range(CONNECTIONS)]
    try:
        bystander.check(20)
        frame = encoded(MetadataRequest(topics=[]), METADATA_VERSION)
        for each in sockets[:: CONNECTIONS // 100]:
            each.sendall(frame)
        for each in sockets[:: CONNECTIONS // 100]:
            assert each.recv(4), "a connection among ten thousand gets no answer"
    finally:
        for each in sockets:
            each.close()


def test_answers_that_are_never_read_cost_little(target: BrokerProcess, bystander: Bystander) -> None:
    with RawClient(target.port) as writer:
        create_topic(writer, "unread")
        large = bytes(good_batch(random.Random(1).randbytes(1_000_000)))
        for _ in range(10):
            assert produce(writer, "unread", large)[0] == 0
    frame = encoded(fetch_request("unread", 0, max_bytes=50 * MIB), FETCH_VERSION)
    clients = [RawClient(target.port) for _ in range(10)]
    for client in clients:
        client.socket.setblocking(False)
        try:
            client.socket.send(frame * 500)
        except BlockingIOError:
            pass
    bystander.check(20)
    for client in clients:
        client.socket.close()


def test_metadata_of_everything_again_and_again(target: BrokerProcess, bystander: Bystander) -> None:
    with RawClient(target.port) as client:
        topics = [
            CreatableTopic(name=f"many-{n}", num_partitions=20, replication_factor=1) for n in range(50)
        ]
        client.ask(CreateTopicsRequest(topics=topics, timeout_ms=10_000), 5, CreateTopicsResponse)
        frame = encoded(MetadataRequest(topics=None), METADATA_VERSION)
        for _ in range(10):
            client.send(frame * 20)
            assert all(client.read_frame() for _ in range(20))
        client.socket.setblocking(False)
        try:
            client.socket.send(frame * 10_000)
        except BlockingIOError:
            pass
        bystander.check(10)


def fetch_of(topic: str, partitions: int) -> FetchRequest:
    parts = [FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=100) for n in range(partitions)]
    return FetchRequest(
        max_wait_ms=0, min_bytes=0, max_bytes=MIB, topics=[FetchTopic(topic=topic, partitions=parts)]
    )


def test_a_fetch_of_as_many_partitions_as_there_may_be(client: RawClient, victim: str) -> None:
    answer = client.ask(fetch_of(victim, 20_000), FETCH_VERSION, FetchResponse)
    codes = {part.error_code for topic in answer.responses for part in topic.partitions}
    assert answer.error_code or codes == {ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


def test_a_fetch_of_a_hundred_thousand_partitions_is_refused(
    client: RawClient, target: BrokerProcess, victim: str
) -> None:
    client.send(encoded(fetch_of(victim, 100_000), FETCH_VERSION))
    assert client.is_closed()
    assert f"closing {client.peer}: a Fetch request of" in target.log


@pytest.mark.parametrize("wait_ms", [2**31 - 1, -1, -(2**31)])
def test_a_fetch_with_an_absurd_wait_does_no_harm(
    client: RawClient, target: BrokerProcess, victim: str, wait_ms: int
) -> None:
    end = end_offset(client, victim)
    client.send(encoded(fetch_request(victim, end, max_wait_ms=wait_ms), FETCH_VERSION))
    with RawClient(target.port) as other:
        assert produce(other, victim, bytes(good_batch()))[0] == 0
    assert client.read_frame()


def test_requests_in_flight_have_one_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("budget") / "broker"
    small = BrokerProcess(directory, {"queued.max.request.bytes": str(16 * MIB)}, in_memory=True).start()
    try:
        before = small.rss_bytes
        clients = [RawClient(small.port) for _ in range(40)]
        frame = large_request(10 * MIB)
        for client in clients:
            client.socket.setblocking(False)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
        unsent = [memoryview(frame) for _ in clients]
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            push(clients, unsent, keep=1000)
        with RawClient(small.port) as other:
            other.ask(MetadataRequest(topics=[]), METADATA_VERSION, MetadataResponse)
        grown = small.rss_bytes - before
        assert grown < 60 * MIB, f"the broker grew by {grown / MIB:.0f} MiB"
        deadline = time.monotonic() + 30.0
        while any(unsent):
            assert time.monotonic() < deadline, "requests wait for each other for ever"
            push(clients, unsent)
        for client in clients:
            client.socket.setblocking(True)
            assert client.read_frame(), "a request that had to wait was not answered"
            client.socket.close()
    finally:
        small.kill()


def large_request(size: int) -> bytes:
    """A request that is large, and answered: the topic does not exist."""
    part = PartitionProduceData(index=0, records=memoryview(bytes(size)))
    topic = TopicProduceData(name="missing", partition_data=[part])
    return encoded(ProduceRequest(acks=-1, timeout_ms=100, topic_data=[topic]), 9)


def push(clients: list[RawClient], unsent: list[memoryview], keep: int = 0) -> None:
    """Send what the sockets take, but for the last bytes of each request."""
    for n, client in enumerate(clients):
        try:
            sent = client.socket.send(unsent[n][: max(0, len(unsent[n]) - keep)])
            unsent[n] = unsent[n][sent:]
        except BlockingIOError:
            continue


def test_broken_requests_leave_nothing_in_the_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("leak") / "broker"
    small = BrokerProcess(directory, {"queued.max.request.bytes": str(4 * MIB)}, in_memory=True).start()
    try:
        broken = pack(">hhih", ApiKey.METADATA, 1, 7, -2) + bytes(MIB)
        for _ in range(10):
            with RawClient(small.port) as client:
                client.send_frame(broken)
                assert client.is_closed()
        large = [RawClient(small.port) for _ in range(3)]
        frame = large_request(MIB)
        for client in large:
            client.send(frame[:-1])
        for client in reversed(large):
            client.send(frame[-1:])
            assert client.read_frame(), "the budget was eaten up"
            client.socket.close()
    finally:
        small.kill()


def test_connections_beyond_the_limit_are_closed_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("limited") / "broker"
    small = BrokerProcess(directory, {"max.connections": "20"}, in_memory=True).start()
    try:
        held = [RawClient(small.port) for _ in range(20)]
        for client in held:
            client.ask(MetadataRequest(topics=[]), METADATA_VERSION, MetadataResponse)
        with RawClient(small.port) as refused:
            assert_refused(small, refused, "max.connections")
        for client in held:
            client.ask(MetadataRequest(topics=[]), METADATA_VERSION, MetadataResponse)
            client.socket.close()
    finally:
        small.kill()


def test_a_silent_connection_is_closed(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("idle") / "broker"
    small = BrokerProcess(directory, {"connections.max.idle.ms": "1000"}, in_memory=True).start()
    try:
        with RawClient(small.port) as idle:
            assert_refused(small, idle, "connections.max.idle.ms")
    finally:
        small.kill()


# Noise.


def test_mutated_requests_never_break_the_broker(tmp_path_factory: pytest.TempPathFactory) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    broker = BrokerProcess(tmp_path_factory.mktemp("noise") / "broker", in_memory=True).start()
    try:
        witness = Bystander(broker.port, topic="witness")
        bodies = valid_bodies()
        client = RawClient(broker.port)
        client.socket.settimeout(0.02)
        for _ in range(MUTANTS):
            client = send_mutant(client, broker.port, dice, dice.choice(bodies))
        witness.check()
        witness.stop()
        assert "this is a bug" not in broker.log, broker.log
    finally:
        broker.kill()


def valid_bodies() -> list[bytes]:
    """Requests that the broker takes, in their oldest and newest versions."""
    batch = memoryview(bytes(good_batch()))
    part = PartitionProduceData(index=0, records=batch)
    requests = [
        (MetadataRequest(topics=[MetadataRequestTopic(name="noise")]), ApiKey.METADATA),
        (
            CreateTopicsRequest(
                topics=[CreatableTopic(name="noise", num_partitions=2, replication_factor=1)], timeout_ms=100
            ),
            ApiKey.CREATE_TOPICS,
        ),
        (
            ProduceRequest(
                acks=1,
                timeout_ms=100,
                topic_data=[TopicProduceData(name="noise", partition_data=[part])],
            ),
            ApiKey.PRODUCE,
        ),
        (fetch_request("noise", 0), ApiKey.FETCH),
        (
            ListOffsetsRequest(
                replica_id=-1,
                topics=[
                    ListOffsetsTopic(
                        name="noise", partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)]
                    )
                ],
            ),
            ApiKey.LIST_OFFSETS,
        ),
        (ApiVersionsRequest(client_software_name="a", client_software_version="1"), ApiKey.API_VERSIONS),
    ]
    bodies = []
    for request, key in requests:
        api = APIS[key]
        versions = {api.max_version - 1, (api.min_version + api.max_version) // 2}
        for version in sorted(versions):
            bodies.append(encoded(request, version)[4:])
    return bodies + empty_bodies()


def empty_bodies() -> list[bytes]:
    """A request of every API that says as little as it can, in all its versions."""
    bodies = []
    for module in iter_modules(messages.__path__):
        loaded = import_module(f"{messages.__name__}.{module.name}")
        for kind in vars(loaded).values():
            if isinstance(kind, type) and kind.__name__.endswith("Request") and hasattr(kind, "API_KEY"):
                for version in range(kind.MIN_VERSION, kind.MAX_VERSION + 1):
                    try:
                        bodies.append(encoded(kind(), version)[4:])
                    except EncodeError:
                        continue  # A field without a default.
    assert len(bodies) > 100
    return bodies


def send_mutant(client: RawClient, port: int, dice: random.Random, body: bytes) -> RawClient:
    """Change some bytes, cut or lengthen the body, and send it. A new connection, if that ended this one."""
    mutant = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(mutant))
        mutant[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    if dice.random() < 0.2:
        mutant = mutant[: dice.randrange(8, len(mutant))]
    elif dice.random() < 0.1:
        mutant += dice.randbytes(dice.randrange(30))
    try:
        client.send_frame(bytes(mutant))
        closed = client.read_frame() == b""
    except TimeoutError:
        # No answer is due to acks=0, and a fetch may wait: the next request finds out.
        closed = dice.random() < 0.5
    except OSError:
        closed = True
    if not closed:
        return client
    client.socket.close()
    fresh = RawClient(port)
    fresh.socket.settimeout(0.02)
    return fresh
