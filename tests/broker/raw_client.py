"""A client that may send anything: bytes on a socket, and a well-behaved one that must not notice.

`Bystander` produces, fetches and asks for metadata all the time on one connection, without retries: if
anybody else's behaviour costs it an answer, an error or much time, it says so.
"""

from __future__ import annotations

import socket
import threading
import time
from struct import Struct
from types import TracebackType
from typing import Final, TypeVar

from semel.wire.batch import iter_batches
from semel.wire.frames import Decodable, Message, decode_response, request_frame
from semel.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch, read_records

TIMEOUT_S: Final = 20.0
PRODUCE_VERSION: Final = 9
FETCH_VERSION: Final = 12
METADATA_VERSION: Final = 9
CREATE_TOPICS_VERSION: Final = 5
_SIZE: Final = Struct(">i")

R = TypeVar("R")


class RawClient:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, own_port = self.socket.getsockname()
        self.peer = f"{host}:{own_port}"
        """How the broker's log names this client."""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def send_frame(self, body: bytes) -> None:
        self.send(_SIZE.pack(len(body)) + body)

    def read_frame(self) -> bytes:
        """One answer, without its size; empty if the broker has closed the connection."""
        head = self._read(_SIZE.size)
        if not head:
            return b""
        (size,) = _SIZE.unpack(head)
        return self._read(size)

    def _read(self, size: int) -> bytes:
        content = b""
        try:
            while len(content) < size:
                piece = self.socket.recv(size - len(content))
                if not piece:
                    return b""
                content += piece
        except ConnectionResetError:
            return b""
        return content

    def is_closed(self) -> bool:
        """Whether the broker closes the connection, rather than answer or wait."""
        return self.read_frame() == b""

    def ask(self, request: Message, version: int, response_type: Decodable[R], client_id: str = "raw") -> R:
        """Send a request as it should be, and decode the answer."""
        self.send(encoded(request, version, client_id))
        answer = self.read_frame()
        assert answer, f"the broker closed the connection instead of answering {type(request).__name__}"
        return decode_response(memoryview(answer), request.API_KEY, version, response_type)[1]


def encoded(request: Message, version: int, client_id: str | None = "raw", correlation_id: int = 7) -> bytes:
    """The frame of a request."""
    return b"".join(map(bytes, request_frame(request, version, correlation_id, client_id)))  # type: ignore[arg-type]


def create_topic(client: RawClient, name: str, **configs: str) -> None:
    topic = CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=1,
        configs=[CreatableTopicConfig(name=key, value=value) for key, value in configs.items()],
    )
    request = CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
    answer = client.ask(request, CREATE_TOPICS_VERSION, CreateTopicsResponse)
    assert answer.topics[0].error_code == 0, answer


def produce(client: RawClient, topic: str, batch: bytes, acks: int = -1) -> tuple[int, int]:
    """Send one batch to partition 0: the error code and the offset."""
    part = PartitionProduceData(index=0, records=memoryview(batch))
    request = ProduceRequest(
        acks=acks, timeout_ms=10_000, topic_data=[TopicProduceData(name=topic, partition_data=[part])]
    )
    answer = client.ask(request, PRODUCE_VERSION, ProduceResponse)
    (told,) = answer.responses[0].partition_responses
    return told.error_code, told.base_offset


def fetch_request(topic: str, offset: int, max_wait_ms: int = 0, max_bytes: int = 1 << 20) -> FetchRequest:
    part = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=max_bytes)
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        topics=[FetchTopic(topic=topic, partitions=[part])],
    )


def end_offset(client: RawClient, topic: str) -> int:
    """The high watermark of partition 0."""
    answer = client.ask(fetch_request(topic, 0), FETCH_VERSION, FetchResponse)
    (told,) = answer.responses[0].partitions
    assert told.error_code == 0, told.error_code
    return int(told.high_watermark)


class Bystander:
    """A healthy client with work of its own."""

    def __init__(self, port: int, topic: str = "bystander", pause_s: float = 0.02) -> None:
        self.rounds = 0
        self.slowest_s = 0.0
        self.failure: str | None = None
        self._topic = topic
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._client = RawClient(port)
        create_topic(self._client, topic)
        self._thread = threading.Thread(target=self._run, name="bystander", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._pause_s):
                started = time.monotonic()
                self._round()
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                self.rounds += 1
        except BaseException as error:
            self.failure = f"round {self.rounds}: {error!r}"

    def _round(self) -> None:
        batch = bytes(build_batch([Record(b"k", b"%d" % self.rounds, int(time.time() * 1000))]))
        code, offset = produce(self._client, self._topic, batch)
        assert (code, offset) == (0, self.rounds), f"produce: error {code}, offset {offset}"
        answer = self._client.ask(fetch_request(self._topic, offset), FETCH_VERSION, FetchResponse)
        (told,) = answer.responses[0].partitions
        assert told.error_code == 0 and told.high_watermark == offset + 1, "fetch"
        assert told.records is not None and len(told.records) == len(batch), "fetch of records"
        wanted = MetadataRequest(topics=[MetadataRequestTopic(name=self._topic)])
        topics = self._client.ask(wanted, METADATA_VERSION, MetadataResponse).topics
        assert topics[0].error_code == 0, "metadata"

    def check(self, more_rounds: int = 3) -> None:
        """Assert that all went well, and that it goes on."""
        wanted = self.rounds + more_rounds
        deadline = time.monotonic() + TIMEOUT_S
        while self.rounds < wanted and self.failure is None:
            assert time.monotonic() < deadline, f"the bystander is stuck in round {self.rounds}"
            time.sleep(0.005)
        assert self.failure is None, f"the bystander met {self.failure}"

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(TIMEOUT_S)
        self._client.socket.close()


def values_in(client: RawClient, topic: str) -> list[bytes | None]:
    """The values of all records in partition 0."""
    values: list[bytes | None] = []
    offset = 0
    while offset < end_offset(client, topic):
        answer = client.ask(fetch_request(topic, offset), FETCH_VERSION, FetchResponse)
        (told,) = answer.responses[0].partitions
        assert told.error_code == 0 and isinstance(told.records, memoryview)
        for header, stored in iter_batches(told.records):
            values += [record.value for record in read_records(stored)]
            offset = header.last_offset + 1
    return values
