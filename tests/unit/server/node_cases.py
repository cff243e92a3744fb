"""A whole node without a socket: its clients are protocol objects, and its disk does as the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from semel.broker.decision import Endpoint
from semel.disk import Buffer, Disk, File, OsDisk
from semel.errors import StorageError
from semel.server.clock import SystemClock
from semel.server.connection import Connection
from semel.server.intake import Intake
from semel.server.node import Node
from semel.server.settings import Settings
from semel.wire.compression import Codec
from semel.wire.frames import Message, decode_response, request_frame
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

BUDGET_BYTES = 64 * 1024 * 1024
WAIT_S = 30.0
TOPIC = "t"


class ObedientFile:
    """A file whose writes and syncs the test may hold or fail."""

    def __init__(self, file: File, disk: ObedientDisk) -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk.check()
        return self._file.pwritev(buffers, offset)

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk.check()
        return self._file.pwritev_sync(buffers, offset)

    def fdatasync(self) -> None:
        self._disk.check()
        self._disk.hold(self.path)
        self._file.fdatasync()


class ObedientDisk:
    """The operating system's files, unless the test says otherwise."""

    def __init__(self) -> None:
        self._disk = OsDisk()
        self.fails = False
        """Whether writes fail from now on."""
        self.may_flush = threading.Event()
        """Cleared: a sync of a segment waits."""
        self.may_flush.set()
        self.is_flushing = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def create(self, path: Path) -> ObedientFile:
        self.check()
        return ObedientFile(self._disk.create(path), self)

    def open(self, path: Path, *, writable: bool = False) -> ObedientFile:
        return ObedientFile(self._disk.open(path, writable=writable), self)

    def check(self) -> None:
        if self.fails:
            raise StorageError("the test lets the disk fail")

    def hold(self, path: Path) -> None:
        if "segments" in path.parts:
            self.is_flushing.set()
            assert self.may_flush.wait(WAIT_S), "the test forgot to let the flush go on"


class Wire(asyncio.Transport):
    """Keeps what is written to the client."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_cut = False

    def is_closing(self) -> bool:
        return self.is_cut

    def abort(self) -> None:
        self.is_cut = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for each in list_of_data:
            self.written += bytes(each)


class Client:
    """Asks one request at a time."""

    def __init__(self, node: Node) -> None:
        self.wire = Wire()
        self._connection = Connection(
            node, Intake(BUDGET_BYTES, BUDGET_BYTES), Endpoint("127.0.0.1", 9092), node.clock.monotonic_ms
        )
        self._connection.connection_made(self.wire)

    def send(self, request: Message, version: int) -> None:
        self.wire.written.clear()
        frame = b"".join(bytes(each) for each in request_frame(request, version, 1, "test"))
        while frame and not self.wire.is_cut:
            room = self._connection.get_buffer(-1)
            taken = min(len(room), len(frame))
            room[:taken] = frame[:taken]
            frame = frame[taken:]
            self._connection.buffer_updated(taken)

    def hang_up(self) -> None:
        self._connection.connection_lost(None)

    def answer(self, request: Message, version: int, response_type: Any) -> Any:
        """The answer, which must be there."""
        assert self.wire.written, "there is no answer"
        _, response = decode_response(
            memoryview(self.wire.written)[4:], request.API_KEY, version, response_type
        )
        return response

    async def ask(self, request: Message, version: int, response_type: Any) -> Any:
        self.send(request, version)
        await until(lambda: bool(self.wire.written) or self.wire.is_cut, "an answer")
        assert not self.wire.is_cut, "the connection was closed"
        return self.answer(request, version, response_type)

    async def create_topic(self) -> None:
        topic = CreatableTopic(name=TOPIC, num_partitions=1, replication_factor=1)
        response = await self.ask(CreateTopicsRequest(topics=[topic]), 5, CreateTopicsResponse)
        assert response.topics[0].error_code == 0

    async def produce(self, value: bytes) -> int:
        """The error code."""
        response = await self.ask(produce_request(value), 9, ProduceResponse)
        return int(response.responses[0].partition_responses[0].error_code)


def produce_request(value: bytes, codec: Codec = Codec.NONE) -> ProduceRequest:
    batch = build_batch([Record(None, value)], codec=codec)
    part = PartitionProduceData(index=0, records=memoryview(batch))
    return ProduceRequest(acks=-1, topic_data=[TopicProduceData(name=TOPIC, partition_data=[part])])


async def until(holds: Callable[[], bool], what: str) -> None:
    """Let the loop go on until something holds."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"not in {WAIT_S} s: {what}"
        await asyncio.sleep(0.001)


async def start_node(directory: Path, disk: ObedientDisk, **settings: str) -> Node:
    """`settings`: with `_` for the dots of their names."""
    flags = {"log.dirs": str(directory), "storage.min.free.bytes": "0", "journal.file.bytes": str(1 << 20)}
    flags |= {name.replace("_", "."): text for name, text in settings.items()}
    node = Node(Settings.load(flags=flags), SystemClock(), cast("Disk", disk), lambda: None)
    await node.start()
    return node
