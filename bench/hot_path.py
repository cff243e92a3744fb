"""What a request costs the event loop, without sockets, threads or a disk: to compare versions of the code.

    .venv/bin/python bench/hot_path.py

Frames are handed to real connections of a broker in memory, and the answers are thrown away. The least of
several rounds is printed: it hardly moves when the machine is busy with other things.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from semel.cli.load import Load, encode_frame
from semel.cli.txn_load import TxnLoad, TxnMeter
from semel.server.connection import Connection
from semel.server.listener import Server
from semel.server.settings import Settings
from semel.wire.frames import decode_response
from semel.wire.messages.api_versions import ApiVersionsRequest
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.records import Record, build_batch

ROUNDS: Final = 15
ROUND_REQUESTS: Final = 300
TOPIC: Final = "hot"


class Sink:
    """A transport that keeps the last answer."""

    def __init__(self) -> None:
        self.last = b""

    def writelines(self, buffers: list[bytes]) -> None:
        self.last = b"".join(buffers)

    def write(self, buffer: bytes) -> None:
        self.last = bytes(buffer)

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Peer:
    """A client without a socket."""

    def __init__(self, server: Server) -> None:
        self.sink = Sink()
        self._connection: Connection = server._accept()
        self._connection.connection_made(cast("asyncio.BaseTransport", self.sink))

    def send(self, frame: bytearray) -> None:
        sent = 0
        while sent < len(frame):
            room = self._connection.get_buffer(-1)
            size = min(len(room), len(frame) - sent)
            room[:size] = frame[sent : sent + size]
            sent += size
            self._connection.buffer_updated(size)

    def answer(self) -> memoryview:
        return memoryview(self.sink.last)[4:]


def measure(name: str, go: Callable[[], None]) -> None:
    best_ns = 0
    for _ in range(ROUNDS):
        began_ns = time.thread_time_ns()
        for _ in range(ROUND_REQUESTS):
            go()
        took_ns = time.thread_time_ns() - began_ns
        best_ns = min(best_ns or took_ns, took_ns)
    print(f"{name:<40}{best_ns / ROUND_REQUESTS / 1000:>8.1f} us", flush=True)


def measure_transactions(peer: Peer) -> None:
    init = InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=60_000)
    peer.send(encode_frame(init, 4))
    _, identity = decode_response(peer.answer(), init.API_KEY, 4, InitProducerIdResponse)
    records = [Record(None, random.Random(1).randbytes(100), time.time_ns() // 1_000_000)]
    load: Load = TxnLoad("t", identity, TOPIC, [0], records, 0.001, TxnMeter())

    def transaction() -> None:
        for _ in range(3):
            frame = load.next_frame()
            assert frame is not None
            peer.send(frame)
            load.take(peer.answer())

    measure("transaction (3 requests, load included)", transaction)


async def main() -> None:
    server = Server(Settings.load(flags={"listeners": "127.0.0.1:0"}), disk=None)
    await server.start()
    peer = Peer(server)
    peer.send(encode_frame(CreateTopicsRequest(topics=[CreatableTopic(TOPIC, 2, 1)]), 5))
    api_versions = encode_frame(ApiVersionsRequest("x", "1"), 3)
    measure("api versions", partial(peer.send, api_versions))
    rng = random.Random(1)
    for size in (1, 16, 1000):
        records = [Record(None, rng.randbytes(1000), time.time_ns() // 1_000_000) for _ in range(size)]
        data = TopicProduceData(name=TOPIC, partition_data=[PartitionProduceData(1, build_batch(records))])
        frame = encode_frame(ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[data]), 9)
        measure(f"produce {size} x 1 KB", partial(peer.send, frame))
    measure_transactions(peer)
    for size in (1000, 1_000_000):
        asked = FetchPartition(partition=1, fetch_offset=0, partition_max_bytes=size)
        topics = [FetchTopic(topic=TOPIC, partitions=[asked])]
        request = FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=size, isolation_level=1, topics=topics)
        frame = encode_frame(request, 11)
        measure(f"fetch {size} bytes", partial(peer.send, frame))
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
