"""How writers reach the intake of their owner: in its process, or over a socket.

Over a socket they send frames: a header, then encoded rows, and an answer for each.
"""

import asyncio
import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from semel.sinks.errors import ConnectionLost, FencedOut, SinkError, WriteFailed
from semel.sinks.receipts import Attempt
from semel.sinks.service import Channel, HomeLoop, OwnerService, ServiceAddress, dial, owner_away
from semel.sinks.sql.dialect import Loaded, Part
from semel.sinks.sql.intake import Intake

# Rows and bytes that follow.
FRAME: Final = struct.Struct(">IQ")
MAX_FRAME_BYTES: Final = 1 << 31
# How many frames wait in the owner's memory for their turn; writers beyond that wait with their own.
MAX_FRAMES: Final = 8
# A frame that has begun is there by then, or its writer is not.
FRAME_TIMEOUT_S: Final = 60.0
# How many frames a writer sends ahead of the answers.
MAX_UNANSWERED: Final = 2


class IntakeWay(ABC):
    """A writer's way to the intake."""

    @abstractmethod
    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        """Hands rows over. What becomes of them is said by a later call, at the latest by `settle`."""

    @abstractmethod
    async def settle(self) -> None:
        """Returns when the server has taken all that was handed over; raises a SinkError otherwise."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go, also of rows that are on their way. Idempotent."""


class LocalIntake(IntakeWay):
    """For writers in the owner's process, in any of its threads: the connection is the owner's loop's."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._home = HomeLoop()

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        return await self._home.run(self._intake.load(attempt, parts))

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass


class IntakeService(OwnerService):
    """The intake over TCP, for writers in other processes; it lives in the owner's loop."""

    def __init__(self, intake: Intake) -> None:
        super().__init__()
        self._intake = intake
        self._room = asyncio.Semaphore(MAX_FRAMES)

    async def _serve(self, fields: Mapping[str, Any], channel: Channel) -> None:
        attempt = Attempt.parse(fields)
        while True:
            rows, size_bytes = FRAME.unpack(await channel.receive(FRAME.size))
            if size_bytes > MAX_FRAME_BYTES:
                raise ValueError("a frame is larger than any row can be")
            async with self._room:
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    content = await channel.receive(size_bytes)
                answer = await self._answer(attempt, Part(rows, content))
            await channel.say(answer)

    async def _answer(self, attempt: Attempt, part: Part) -> dict[str, object]:
        try:
            await self._intake.load(attempt, [part])
        except Exception as error:  # whatever it is: who is not answered looks for the owner
            return _as_fields(error)
        return {}


class RemoteIntake(IntakeWay):
    """For writers in other processes: one connection for as long as the writer lives.

    Rows leave in the background: while the owner loads one frame, the writer makes the next.
    """

    def __init__(self, service: ServiceAddress) -> None:
        self._service = service
        self._channel: Channel | None = None
        self._sending: asyncio.Task[None] | None = None
        self._unanswered = 0

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        rows = sent = 0
        for part in parts:
            with self._explained():
                if self._unanswered == MAX_UNANSWERED:
                    await self._hear_answer()
                await self._last_is_sent()
                if self._channel is None:
                    self._channel = await dial(self._service, attempt.fields())
            self._sending = asyncio.create_task(_send(self._channel, part))
            self._unanswered += 1
            rows += part.rows
            sent += len(part.content)
        return Loaded(rows, sent, rows)

    async def settle(self) -> None:
        with self._explained():
            while self._unanswered:
                await self._hear_answer()
            await self._last_is_sent()

    async def close(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _last_is_sent(self) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending})
            self._sending.result()

    async def _hear_answer(self) -> None:
        assert self._channel is not None
        fields = await self._channel.hear()
        self._unanswered -= 1
        error = _from_fields(fields)
        if error is not None:
            raise error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TimeoutError) as error:
            raise owner_away("rows could not be brought to", self._service, error) from error


async def _send(channel: Channel, part: Part) -> None:
    try:
        await channel.send(FRAME.pack(part.rows, len(part.content)))
        await channel.send(part.content)
    except BaseException:
        channel.hang_up()  # there will be no answer to wait for
        raise


# Errors on the way to a writer elsewhere: by class, since that says what its owner may do.

_LOST, _FENCED, _FAILED, _REFUSED = "lost", "fenced", "failed", "refused"
# So that it fits into a message, however its characters are written there.
MAX_REASON_CHARACTERS: Final = 4_000


def _as_fields(error: Exception) -> dict[str, object]:
    message = (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]
    if isinstance(error, ConnectionLost):
        return {"kind": _LOST, "message": message}
    if isinstance(error, FencedOut):
        return {"kind": _FENCED, "message": message}
    is_permanent = isinstance(error, WriteFailed) and error.is_permanent
    return {"kind": _REFUSED if is_permanent else _FAILED, "message": message}


def _from_fields(fields: Mapping[str, Any]) -> SinkError | None:
    kind, message = fields.get("kind"), str(fields.get("message", ""))
    if kind is None:
        return None
    if kind == _LOST:
        return ConnectionLost(message)
    if kind == _FENCED:
        return FencedOut(message)
    return WriteFailed(message, is_permanent=kind == _REFUSED)
