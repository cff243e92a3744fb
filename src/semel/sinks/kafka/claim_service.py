"""How writers reach the claim book of their owner: in its process, or over a socket.

Over a socket each request has a number, and is answered when it can be: a writer waits for many turns at
once.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import astuple
from typing import Any, Final, TypeAlias

from semel.client.metadata import TopicPartition
from semel.errors import SemelError
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.receipts import Attempt
from semel.sinks.service import Channel, HomeLoop, OwnerService, ServiceAddress, dial, owner_away


class Claims(ABC):
    """A writer's way to the claim book."""

    @abstractmethod
    async def shape(self, attempt: Attempt, topic: str) -> TopicShape | None:
        """The topic as the owner has found it, the same for all writers of an epoch. None: there is none."""

    @abstractmethod
    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        """Returns the sequence at which to go on; raises WriteFailed otherwise, and nothing may be sent."""

    @abstractmethod
    async def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        """Gives a partition back, after all for it was acknowledged."""

    @abstractmethod
    async def leave(self, attempt: Attempt) -> None:
        """Lets go. Idempotent."""


# Takes a partition into the owner's transaction: version 1 needs that before the first batch.
Join: TypeAlias = Callable[[Iterable[TopicPartition]], Awaitable[None]]
# Finds a topic's shape, the same each time.
FindShape: TypeAlias = Callable[[str], Awaitable[TopicShape | None]]


class LocalClaims(Claims):
    """For writers in the owner's process, in any of its threads, and for its service.

    The book belongs to the owner's loop, where what each method asks for is done, at once if that is the
    caller's own.
    """

    def __init__(self, book: ClaimBook, join: Join, find_shape: FindShape) -> None:
        self._book = book
        self._join = join
        self._find_shape = find_shape
        self._home = HomeLoop()

    async def shape(self, attempt: Attempt, topic: str) -> TopicShape | None:
        return await self._home.run(self._shape(attempt, topic))

    async def _shape(self, attempt: Attempt, topic: str) -> TopicShape | None:
        self._book.require_present(attempt)
        try:
            return await self._find_shape(topic)
        except SemelError as error:
            raise WriteFailed(f"topic {topic!r} could not be looked up: {error}") from error

    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        return await self._home.run(self._take(attempt, where, keeps=keeps))

    async def _take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        sequence = await self._book.take(attempt, where, keeps=keeps)
        if sequence == 0:
            try:
                await self._join([where])
            except SemelError as error:
                raise WriteFailed(f"{where} did not join the transaction: {error}") from error
        return sequence

    async def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        await self._home.run(self._give(attempt, where, next_sequence))

    async def _give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        self._book.give(attempt, where, next_sequence)

    async def leave(self, attempt: Attempt) -> None:
        await self._home.run(self._leave(attempt))

    async def _leave(self, attempt: Attempt) -> None:
        self._book.leave(attempt)


# What a request says: its number, the partition, and whether it is kept, or with which sequence it is given
# back; or the topic whose shape is asked for.
_NUMBER: Final = "number"
_TOPIC: Final = "topic"
_PARTITION: Final = "partition"
_SHAPE: Final = "shape"
_KEEPS: Final = "keeps"
_GIVES: Final = "gives"
_SEQUENCE: Final = "sequence"
_REFUSED: Final = "refused"


class ClaimService(OwnerService):
    """Claims over TCP, for writers in other processes; it lives in the owner's loop."""

    def __init__(self, claims: LocalClaims) -> None:
        super().__init__()
        self._claims = claims

    async def _serve(self, fields: Mapping[str, Any], channel: Channel) -> None:
        """The first message says who it is; each that follows asks for something."""
        attempt = Attempt.parse(fields)
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                request = await channel.hear()
                task = asyncio.create_task(self._answer(attempt, _number(request, _NUMBER), request, channel))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            await self._claims.leave(attempt)

    async def _answer(
        self, attempt: Attempt, number: int, request: Mapping[str, Any], channel: Channel
    ) -> None:
        try:
            answer = await self._do(attempt, request)
        except Exception as error:  # whatever it is: a writer that is not answered waits for long
            answer = {_REFUSED: str(error) or type(error).__name__}
        await channel.say({_NUMBER: number, **answer})

    async def _do(self, attempt: Attempt, request: Mapping[str, Any]) -> dict[str, object]:
        topic = str(request.get(_TOPIC))
        if _SHAPE in request:
            shape = await self._claims.shape(attempt, topic)
            return {_SHAPE: None if shape is None else astuple(shape)}
        where = TopicPartition(topic, _number(request, _PARTITION))
        if _GIVES in request:
            await self._claims.give(attempt, where, _number(request, _GIVES))
            return {}
        keeps = request.get(_KEEPS) is True
        return {_SEQUENCE: await self._claims.take(attempt, where, keeps=keeps)}


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is no number")
    return value


class RemoteClaims(Claims):
    """For writers in other processes: one connection for as long as the writer lives.

    `timeout_s` is how long a writer waits for an answer: as long as its transaction may be open.
    """

    def __init__(self, service: ServiceAddress, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._lost: OSError | ValueError | None = None
        self._last_number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._saying = asyncio.Lock()

    async def shape(self, attempt: Attempt, topic: str) -> TopicShape | None:
        answer = await self._ask(attempt, topic, {_TOPIC: topic, _SHAPE: True})
        told = answer.get(_SHAPE)
        return None if told is None else TopicShape(*map(int, told))

    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        answer = await self._ask(attempt, where, {**where._asdict(), _KEEPS: keeps})
        return _number(answer, _SEQUENCE)

    async def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        await self._ask(attempt, where, {**where._asdict(), _GIVES: next_sequence})

    async def leave(self, attempt: Attempt) -> None:
        hearing, self._hearing = self._hearing, None
        if hearing is not None:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _ask(
        self, attempt: Attempt, what: TopicPartition | str, fields: dict[str, object]
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._answered(attempt, fields)
        except (OSError, ValueError, TimeoutError) as error:
            raise owner_away(f"{attempt} could not claim {what} from", self._service, error) from error
        if _REFUSED in answer:
            raise WriteFailed(str(answer[_REFUSED]))
        return answer

    async def _answered(self, attempt: Attempt, fields: dict[str, object]) -> dict[str, Any]:
        async with self._saying:  # messages of several tasks must not be mixed
            if self._channel is None:
                self._channel = await dial(self._service, attempt.fields())
                self._channel.expect_reader()
                self._hearing = asyncio.create_task(self._hear(self._channel))
            if self._lost is not None:
                raise self._lost
            self._last_number += 1
            number = self._last_number
            answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._waiting[number] = answer
            await self._channel.say({_NUMBER: number, **fields})
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _hear(self, channel: Channel) -> None:
        try:
            while True:
                answer = await channel.hear()
                waiting = self._waiting.get(_number(answer, _NUMBER))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, ValueError) as error:
            self._lost = error
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)
