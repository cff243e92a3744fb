"""A load generator that leaves the CPU to the broker: prebuilt frames, callbacks, no tasks and no futures.

A `LoadConnection` keeps a fixed number of requests in flight: whenever an answer arrives the next request
leaves. What is sent and what an answer means is the business of its `Load`. Latency runs from the write of a
request to the arrival of its whole answer.
"""

import asyncio
import time
from array import array
from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import Final, Protocol, cast

from semel.client.connection import Request
from semel.client.errors import UnreachableError
from semel.client.framing import FrameProtocol
from semel.client.metadata import Address
from semel.errors import ProtocolError, SemelError
from semel.wire.frames import request_frame

CORRELATION_ID: Final = Struct(">i")
# Size, API key and version come before it.
REQUEST_CORRELATION_ID_AT: Final = 8
MAX_CORRELATION_ID: Final = 0x7FFFFFFF
DRAIN_TIMEOUT_S: Final = 10.0
CLIENT_ID: Final = "semel-bench"


def encode_frame(request: Request, version: int) -> bytearray:
    """A whole request in one buffer; its correlation id is filled in later."""
    return bytearray().join(cast("list[bytes]", request_frame(request, version, 0, CLIENT_ID)))


class Meter:
    """What was measured."""

    __slots__ = ("latencies_s", "payload_bytes", "records", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.records = 0
        self.payload_bytes = 0
        self.latencies_s: array[float] = array("d")


@dataclass(slots=True, frozen=True)
class Answered:
    """What one answer adds to the meter."""

    records: int
    payload_bytes: int
    pause_s: float = 0.0
    """How long to wait before the next request."""


class Load(Protocol):
    """What a connection sends."""

    def next_frame(self) -> bytearray | None:
        """The next request, with room for its correlation id; None when there is nothing more to ask."""

    def take(self, frame: memoryview) -> Answered:
        """Looks at an answer; raises SemelError where it reports a failure."""


class LoadConnection(FrameProtocol):
    """Keeps a broker busy with one load."""

    def __init__(self, load: Load, in_flight: int, meter: Meter, ended: asyncio.Future[None]) -> None:
        super().__init__()
        self.meter = meter
        self._load = load
        self._wanted_in_flight = in_flight
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._sent: deque[tuple[int, float]] = deque()
        self._correlation_id = 0
        self._is_stopping = False

    def start(self) -> None:
        for _ in range(self._wanted_in_flight):
            self._send_next()
        self._end_if_idle()

    def stop(self) -> None:
        """Sends nothing more; ends when all is answered."""
        self._is_stopping = True
        self._end_if_idle()

    def abort(self) -> None:
        self._is_stopping = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports are not registered as asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(UnreachableError(f"the broker closed a connection under load: {exc or 'no reason given'}"))

    def framing_failed(self, error: ProtocolError) -> None:
        self._end(error)

    def frame_received(self, frame: memoryview) -> None:
        now = time.perf_counter()
        expected, sent_at = self._sent.popleft()
        try:
            if CORRELATION_ID.unpack_from(frame, 0)[0] != expected:
                raise ProtocolError("the broker answered out of order")
            answered = self._load.take(frame)
        except SemelError as error:
            self._end(error)
            return
        meter = self.meter
        meter.requests += 1
        meter.records += answered.records
        meter.payload_bytes += answered.payload_bytes
        meter.latencies_s.append(now - sent_at)
        if answered.pause_s and not self._is_stopping:
            asyncio.get_running_loop().call_later(answered.pause_s, self._go_on)
            return
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_stopping:
            self._send_next()
        self._end_if_idle()

    def _send_next(self) -> None:
        frame = self._load.next_frame()
        if frame is None:
            self._is_stopping = True
            return
        self._correlation_id = (self._correlation_id + 1) & MAX_CORRELATION_ID
        CORRELATION_ID.pack_into(frame, REQUEST_CORRELATION_ID_AT, self._correlation_id)
        self._sent.append((self._correlation_id, time.perf_counter()))
        assert self._transport is not None
        self._transport.write(frame)

    def _end_if_idle(self) -> None:
        if self._is_stopping and not self._sent:
            self._end(None)

    def _end(self, error: SemelError | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
        self.abort()


@dataclass(slots=True, frozen=True)
class Timing:
    """How long to warm up, and how long to measure (None: until the loads have nothing more to ask)."""

    warmup_s: float
    measured_s: float | None


class Probe(Protocol):
    """Something that is read at both ends of the measured time."""

    def read(self) -> None: ...


async def run_loads(
    address: Address, loads: list[Load], in_flight: int, timing: Timing, probes: list[Probe]
) -> tuple[Meter, float]:
    """Runs every load on a connection of its own; returns what was measured and for how long."""
    loop = asyncio.get_running_loop()
    connections: list[LoadConnection] = []
    ends: list[asyncio.Future[None]] = []
    for load in loads:
        ended: asyncio.Future[None] = loop.create_future()
        connection = LoadConnection(load, in_flight, Meter(), ended)
        await loop.create_connection(lambda made=connection: made, address.host, address.port)  # type: ignore[misc]
        connections.append(connection)
        ends.append(ended)
    try:
        for connection in connections:
            connection.start()
        if timing.warmup_s:
            await _wait(ends, timing.warmup_s)
        meter = Meter()
        for connection in connections:
            connection.meter = meter
        for probe in probes:
            probe.read()
        began = time.perf_counter()
        await _wait(ends, timing.measured_s)
        elapsed_s = time.perf_counter() - began
        for probe in probes:
            probe.read()
        for connection in connections:
            connection.meter = Meter()  # what still comes in is not counted
            connection.stop()
        await _wait(ends, DRAIN_TIMEOUT_S)
        return meter, elapsed_s
    finally:
        for connection in connections:
            connection.abort()


async def _wait(ends: list[asyncio.Future[None]], timeout_s: float | None) -> None:
    """Waits for the time, or for all ends; raises the first failure at once."""
    done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for ended in done:
        ended.result()
