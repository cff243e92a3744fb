"""One client connection: frames in, answers out, in the order of the requests.

Reading. Small requests arrive in a scratch buffer that all connections share, and each is copied into a
buffer of its own, since the journal may hold it long after. A request that is not complete is read straight
into its own buffer. A large one is given room as its bytes arrive, not on the strength of its announced
size.

Answering. Each request takes a slot in line. An answer leaves when it and all before it are there. A client
that pipelines more than `MAX_PIPELINED` requests, or does not read its answers, is not read from until it
catches up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Final, Protocol, cast

from semel.broker.decision import Endpoint
from semel.broker.transactions.lifeline import Lifeline
from semel.errors import ProtocolError
from semel.server.intake import Intake
from semel.server.large_requests import PLAIN_FRAME_BYTES, may_be_large
from semel.server.refusals import can_refuse, refusal
from semel.wire.frames import FrameBuffer, Message, RequestHeader, decode_request_header, response_frame

log = logging.getLogger(__name__)

MAX_PIPELINED: Final = 64
EAGER_FRAME_BYTES: Final = 2 * 1024 * 1024
"""Up to this size a request gets all its room at once, while there is plenty ..."""
FRUGAL_FRAME_BYTES: Final = 16 * 1024
"""... and this much otherwise: what was only announced must not cost memory."""
FREE_BYTES: Final = 64 * 1024
"""A connection with no more than this under way is read from even when the budget is spent."""
SCRATCH_KEEP_BYTES: Final = 4096
"""A request below this size that is cut off by the end of a read waits in the backlog for the rest."""
MIN_FRAME_BYTES: Final = 8
WRITE_HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
_SIZE: Final = Struct(">i")
_API_KEY: Final = Struct(">h")


class Slot:
    """A request in line for its answer."""

    __slots__ = (
        "_buffers",
        "_connection",
        "_done",
        "_size",
        "_start",
        "_throttle_time_ms",
        "header",
        "request",
    )

    def __init__(self, connection: Connection, header: RequestHeader, size: int) -> None:
        self.header = header
        self.request: Message | None = None
        self._connection = connection
        self._size = size
        self._buffers: list[FrameBuffer] = []
        self._done = False
        self._start: Callable[[], None] | None = None
        self._throttle_time_ms = 0

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def is_open(self) -> bool:
        """Whether anybody still waits for the answer."""
        return not self._connection.is_closed

    def when_first(self, start: Callable[[], None]) -> None:
        """Run `start` when all earlier requests of this connection have been answered."""
        if self._connection.is_first(self):
            start()
        else:
            self._start = start

    def answer(self, response: Message | None) -> None:
        """Give the answer, or None where the client wants none."""
        header = self.header
        if response is not None:
            if self._throttle_time_ms and hasattr(response, "throttle_time_ms"):
                response.throttle_time_ms = self._throttle_time_ms
            self._buffers = response_frame(
                header.api_key, header.api_version, header.correlation_id, response
            )
        self._finish()

    @property
    def is_throttled(self) -> bool:
        return self._throttle_time_ms > 0

    def throttle(self, throttle_time_ms: int) -> None:
        """The client has used too much: tell it with the answer, and read nothing from it for so long."""
        self._throttle_time_ms = max(self._throttle_time_ms, throttle_time_ms)
        self._connection.mute(throttle_time_ms)

    def refuse(self) -> None:
        """Tell the client to try again; where no answer can say so, the end of the connection does."""
        request = self.request
        if request is not None and can_refuse(request.API_KEY):
            self.answer(refusal(request))
        else:
            self._connection.abort()

    def answer_as_version(self, response: Message, version: int) -> None:
        """Answer in another version than was asked for: only for ApiVersions that we do not know."""
        header = self.header
        self._buffers = response_frame(header.api_key, version, header.correlation_id, response)
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self.request = None
        self._connection.answered(self)

    # For the connection.

    def take(self) -> list[FrameBuffer] | None:
        """The answer once it is there."""
        return self._buffers if self._done else None

    def begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            start()

    @property
    def size(self) -> int:
        return self._size


class Service(Protocol):
    """Whoever answers requests."""

    def handle(self, slot: Slot, body: memoryview, pos: int) -> None: ...

    def opened(self, connection: Connection) -> bool:
        """Whether the connection may stay."""

    def closed(self, connection: Connection) -> None: ...


class Parked(Protocol):
    """A request that waits for news."""

    def hurry(self) -> None:
        """Answer with what there is."""

    def abandon(self) -> None:
        """The client has gone."""


class Connection(asyncio.BufferedProtocol):
    """A client, as the event loop drives it."""

    def __init__(
        self, service: Service, intake: Intake, endpoint: Endpoint, now_ms: Callable[[], int]
    ) -> None:
        self.endpoint = endpoint
        self.number = 0
        """Connections are numbered as they are opened."""
        self.peer = "?"
        self.peer_host = "?"
        self.is_closed = False
        self.lifeline: Lifeline | None = None
        """What is to be aborted when the connection is gone, where its client asked for that."""
        self.last_active_ms = now_ms()
        self._now_ms = now_ms
        self._service = service
        self._intake = intake
        self._transport: asyncio.Transport | None = None
        self._slots: deque[Slot] = deque()
        self._backlog = b""
        self._frame: bytearray | None = None
        self._frame_size = 0
        self._filled = 0
        self._charged = 0
        """Bytes of the budget for the request that is being read ..."""
        self._taken = 0
        """... and for those in line."""
        self._awaits_room = False
        self._write_paused = False
        self._read_paused = False
        self._consuming = False
        self._is_stopping = False
        self._muted_until_ms = 0
        self._unmute_timer: asyncio.TimerHandle | None = None
        self._is_held = False
        self._parked: Parked | None = None

    # The life of the connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports have all of its methods and are no subclass of it.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        address = transport.get_extra_info("peername")
        if address:
            self.peer_host = str(address[0])
            self.peer = f"{address[0]}:{address[1]}"
        if not self._service.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._unmute_timer is not None:
            self._unmute_timer.cancel()
        if self._parked is not None:
            self._parked.abandon()
        self._service.closed(self)
        self._intake.give_way(self)
        self._intake.refund(self._charged + self._taken)
        self._charged = 0
        self._taken = 0
        self._frame = None
        self._backlog = b""
        self._slots.clear()

    def close(self, why: str) -> None:
        """End a connection whose peer broke the rules; the log says who and why."""
        if not self.is_closed:
            log.warning("closing %s: %s", self.peer, why)
            self.abort()

    def abort(self) -> None:
        self.lifeline = None  # A client that the broker hangs up on, for being idle perhaps, is not dead.
        if self._transport is not None:
            self._transport.abort()
        self.is_closed = True

    @property
    def slots(self) -> Iterable[Slot]:
        """The requests in line."""
        return self._slots

    def park(self, parked: Parked | None) -> None:
        """The first request in line waits for something other than the disk; None when it does no longer."""
        self._parked = parked

    def stop_reading(self) -> None:
        """The broker is stopping: take no more requests, and answer parked ones with what there is."""
        self._read_paused = self._is_stopping = True
        if self._transport is not None and not self.is_closed:
            self._transport.pause_reading()
        if self._parked is not None:
            self._parked.hurry()

    @property
    def is_drained(self) -> bool:
        """Whether every request that was taken has been answered, and the answer has left."""
        return not self._slots and (self._transport is None or self._transport.get_write_buffer_size() == 0)

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._filled :]
        return self._intake.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active_ms = self._now_ms()
        if self._frame is None:
            scratch = self._intake.scratch[:nbytes]
            self._consume(scratch if not self._backlog else memoryview(self._backlog + bytes(scratch)))
            return
        self._filled += nbytes
        if self._filled == self._frame_size:
            self._complete_frame()
        elif self._filled == len(self._frame):
            self._grow_frame()

    def _consume(self, received: memoryview) -> None:
        """Take all whole requests out of what was received, and keep or start what is left."""
        self._backlog = b""
        self._consuming = True
        pos = 0
        end = len(received)
        while end - pos >= _SIZE.size and not self.is_closed:
            if not self._may_take:
                break
            (size,) = _SIZE.unpack_from(received, pos)
            if not MIN_FRAME_BYTES <= size <= self._intake.max_frame_bytes:
                self.close(
                    f"a request of {size} bytes was announced; allowed are {MIN_FRAME_BYTES} to "
                    f"{self._intake.max_frame_bytes} (socket.request.max.bytes)"
                )
                break
            start = pos + _SIZE.size
            if size > PLAIN_FRAME_BYTES:
                if end - start < _API_KEY.size:
                    break
                (api_key,) = _API_KEY.unpack_from(received, start)
                if not may_be_large(api_key):
                    self.close(
                        f"a request of {size} bytes with API key {api_key} was announced; "
                        f"all but Produce may have {PLAIN_FRAME_BYTES}"
                    )
                    break
            if end - start < size:
                if end - start >= SCRATCH_KEEP_BYTES or size > SCRATCH_KEEP_BYTES:
                    self._start_frame(size, received[start:])
                    pos = end
                break
            self._intake.charge(size)
            pos = start + size
            self._dispatch(bytearray(received[start:pos]))
        if pos < end and not self.is_closed:
            self._backlog = bytes(received[pos:])
        self._consuming = False
        self._pace()

    @property
    def _may_take(self) -> bool:
        return (
            len(self._slots) < MAX_PIPELINED
            and not self._write_paused
            and not self._is_stopping
            and self._unmute_timer is None
            and not self._is_held
        )

    def _start_frame(self, size: int, received: memoryview) -> None:
        eager_bytes = EAGER_FRAME_BYTES if self._intake.has_plenty else FRUGAL_FRAME_BYTES
        room = min(size, max(eager_bytes, 2 * len(received)))
        self._frame = bytearray(room)
        self._frame[: len(received)] = received
        self._frame_size = size
        self._filled = len(received)
        self._charge(room)

    def _grow_frame(self) -> None:
        frame = self._frame
        assert frame is not None
        # Another buffer: the loop may still hold this one, and then it cannot be resized.
        grown = bytearray(min(self._frame_size, 2 * len(frame)))
        grown[: len(frame)] = frame
        self._frame = grown
        self._charge(len(grown) - len(frame))
        self._pace()

    def _charge(self, size: int) -> None:
        self._charged += size
        self._intake.charge(size)

    def _complete_frame(self) -> None:
        frame = self._frame
        assert frame is not None
        self._frame = None
        self._charged = 0
        self._dispatch(frame)
        self._intake.give_way(self)
        self._pace()

    def _dispatch(self, frame: bytearray) -> None:
        body = memoryview(frame)
        self._taken += len(frame)
        try:
            header, pos = decode_request_header(body)
            slot = Slot(self, header, len(frame))
            self._slots.append(slot)
            self._service.handle(slot, body, pos)
        except ProtocolError as error:
            self.close(str(error))

    # Pacing: stop reading while the client is ahead of us, or we are out of room.

    def _pace(self) -> None:
        if self._transport is None or self.is_closed or self._is_stopping:
            return
        blocked = not self._may_take
        if blocked:
            self._intake.give_way(self)
        starved = not blocked and self._wants_room and not self._intake.may_read(self)
        if starved and not self._awaits_room:
            self._awaits_room = True
            self._intake.wait_for_room(self._room_made)
        if (blocked or starved) and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()
        elif self._read_paused and not blocked and not starved:
            self._read_paused = False
            self._transport.resume_reading()

    @property
    def _wants_room(self) -> bool:
        """Whether reading on costs more than a connection may always have."""
        return self._frame is not None or self._taken > FREE_BYTES

    def _room_made(self) -> None:
        self._awaits_room = False
        self._pace()

    def mute(self, throttle_time_ms: int) -> None:
        """Take no request for so long: the client has used more than its quota."""
        until_ms = self._now_ms() + throttle_time_ms
        if until_ms <= self._muted_until_ms:
            return
        self._muted_until_ms = until_ms
        if self._unmute_timer is not None:
            self._unmute_timer.cancel()
        loop = asyncio.get_running_loop()
        self._unmute_timer = loop.call_later(throttle_time_ms / 1000, self._unmute)

    def _unmute(self) -> None:
        self._unmute_timer = None
        if not self.is_closed:
            self._catch_up()

    def hold(self) -> None:
        """Take no request until `release`: the last one is not decided yet, and they are decided in order."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        if not self.is_closed:
            self._catch_up()

    def _catch_up(self) -> None:
        """After answers have left: take requests that were received but had to wait."""
        if self._backlog and self._may_take and self._frame is None and not self._consuming:
            self._consume(memoryview(self._backlog))
        else:
            self._pace()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._pace()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._slots:
            self._slots[0].begin()
        self._catch_up()

    # Answering.

    def is_first(self, slot: Slot) -> bool:
        return self._slots[0] is slot and not self._write_paused

    def answered(self, slot: Slot) -> None:
        """A slot has its answer: send all that are complete from the head of the line."""
        if self.is_closed or not self._slots or self._slots[0] is not slot:
            return
        buffers: list[FrameBuffer] = []
        refund = 0
        while self._slots:
            answer = self._slots[0].take()
            if answer is None:
                break
            refund += self._slots.popleft().size
            buffers += answer
        # A client that has hung up is owed nothing. From Python 3.12 on asyncio takes no write then.
        if buffers and self._transport is not None and not self._transport.is_closing():
            self.last_active_ms = self._now_ms()
            self._transport.writelines(buffers)  # type: ignore[arg-type]
        self._taken -= refund
        self._intake.refund(refund)
        if self._slots and not self._write_paused:
            self._slots[0].begin()
        if self._read_paused or self._backlog:
            self._catch_up()
