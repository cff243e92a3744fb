"""Claims: one attempt a task, and one writer a partition at a time, in an epoch of a shared transaction.

All writers of a Kafka epoch have one producer id and epoch. Two of them that write to one partition at the
same time are taken for one that repeats itself: rows are lost and doubled, and all of them are acknowledged.
So a writer takes a partition from the owner before it sends to it. Rules:

- A partition is one writer's at a time. It is taken with the sequence at which to go on, and given back, once
  all is acknowledged, with the one that follows. Others wait in line. A writer may keep a partition to its
  end, where no other is to have rows for it: then whoever comes second is refused, and the epoch is spoiled.
- A task has one writer in an epoch, known by a random name of its own. Whoever comes second is refused, and
  the epoch is spoiled: rows of the first may be there that no receipt counts.
- A writer that goes away with a partition in its hands spoils the epoch: nobody knows what of it is there.
- What comes from another run or epoch is refused and spoils nothing: it is a zombie's, and whatever it sends
  is refused by the broker.
- What was given back must be covered by the receipts, task by task: otherwise the epoch is not committed.
- How many partitions a topic has, the owner tells, so that all writers of an epoch put a key in the same
  place.

A spoiled epoch is aborted and run again under another producer epoch, where nothing of the old one arrives.

`ClaimBook` holds the rules, and belongs to the owner's loop. Writers in this process ask it through
`LocalClaims`, others over a socket (`ClaimService`, `RemoteClaims`): each request has a number, and is
answered when it can be.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from semel.client.metadata import TopicPartition
from semel.errors import SemelError
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import Channel, HomeLoop, OwnerService, ServiceAddress, dial
from semel.wire.batch import MAX_SEQUENCE


@dataclass(slots=True)
class Turn:
    """Who has a partition, who waits for it, and how far it has come."""

    holder: Attempt | None = None
    is_kept: bool = False
    next_sequence: int = 0
    line: deque[tuple[Attempt, "asyncio.Future[int]"]] = field(default_factory=deque)


class ClaimBook:
    """Who writes where in the present epoch."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._writers: dict[int, Attempt] = {}
        self._turns: dict[TopicPartition, Turn] = {}
        self._written: dict[int, dict[str, int]] = {}
        self._spoiled: str | None = None

    @property
    def spoiled(self) -> str | None:
        """Why the present epoch can only be aborted, if so."""
        return self._spoiled

    def open(self, place: Place) -> None:
        """A new epoch: nothing is claimed."""
        self.close()
        self._place = place
        self._writers, self._turns, self._written, self._spoiled = {}, {}, {}, None

    def close(self) -> None:
        """The epoch is over: every claim is refused from here on."""
        self._place = None
        self._turn_away("the epoch is over: what is written now will not be committed")

    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool = False) -> int:
        """Waits for the partition; returns the sequence at which to go on. Raises WriteFailed if refused."""
        self._require_welcome(attempt)
        turn = self._turns.setdefault(where, Turn(is_kept=keeps))
        if turn.is_kept and (turn.holder is not None or turn.next_sequence):
            raise WriteFailed(
                self._spoil(
                    f"{attempt} has rows for {where}, which another keeps for itself: rows without a key go "
                    "to partitions of their task; say how many tasks there are (`tasks=`)"
                )
            )
        if turn.holder is None:
            turn.holder = attempt
            return turn.next_sequence
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        turn.line.append((attempt, granted))
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._pass_on(turn)  # it came too late
            raise

    def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        """Takes the partition back: all is acknowledged. Raises WriteFailed if it is not this writer's."""
        self._require_welcome(attempt)
        turn = self._turns.get(where)
        if turn is None or turn.holder != attempt:
            raise WriteFailed(self._spoil(f"{attempt} gives {where} back, and does not have it"))
        rows = (next_sequence - turn.next_sequence) & MAX_SEQUENCE
        written = self._written.setdefault(attempt.task, {})
        written[str(where)] = written.get(str(where), 0) + rows
        turn.next_sequence = next_sequence
        self._pass_on(turn)

    def leave(self, attempt: Attempt) -> None:
        """The writer is gone. Idempotent."""
        if attempt.place != self._place:
            return
        held = [str(where) for where, turn in self._turns.items() if turn.holder == attempt]
        if held:
            self._spoil(f"{attempt} went away while it wrote to {', '.join(sorted(held))}")

    def require_present(self, attempt: Attempt) -> None:
        """Raises WriteFailed if it is of another run or epoch."""
        if attempt.place != self._place:
            raise WriteFailed(
                f"{attempt} is of {attempt.place}, which is over: its rows will not be committed"
            )

    def _require_welcome(self, attempt: Attempt) -> None:
        self.require_present(attempt)
        first = self._writers.setdefault(attempt.task, attempt)
        if first != attempt:
            self._spoil(
                f"task {attempt.task} was tried twice (attempts {first.attempt} and {attempt.attempt}), and "
                "the first may have written already"
            )
        if self._spoiled is not None:
            raise WriteFailed(f"{self._spoiled}. The epoch is spoiled: abort it and run it again")

    def _pass_on(self, turn: Turn) -> None:
        turn.holder = None
        while turn.line:
            attempt, granted = turn.line.popleft()
            if not granted.done():
                turn.holder = attempt
                granted.set_result(turn.next_sequence)
                return

    def _spoil(self, reason: str) -> str:
        self._spoiled = self._spoiled or reason
        said = f"{reason}. The epoch is spoiled: abort it and run it again"
        self._turn_away(said)
        return said

    def _turn_away(self, reason: str) -> None:
        for turn in self._turns.values():
            for _, granted in turn.line:
                if not granted.done():
                    granted.set_exception(WriteFailed(reason))
            turn.line.clear()

    def check_covered(self, receipts: Iterable[Receipt]) -> None:
        """Raises unless the receipts account for exactly what was written."""
        if self._spoiled is not None:
            raise CommitFailed(f"{self._spoiled}. Abort the epoch and run it again")
        for where, turn in self._turns.items():
            if turn.holder is not None:
                raise CommitFailed(
                    f"{turn.holder} still writes to {where}, or has died there. Abort the epoch and run it "
                    "again"
                )
        written = dict(self._written)
        for receipt in receipts:
            writer = self._writers.get(receipt.task)
            if receipt.parts != written.pop(receipt.task, {}) or (
                writer is not None and writer.attempt != receipt.attempt
            ):
                raise CommitFailed(
                    f"the receipt of attempt {receipt.attempt} of task {receipt.task} does not account for "
                    "what the task has written: a second attempt took its place. Abort and run it again"
                )
        for task, parts in written.items():
            raise CommitFailed(
                f"task {task} has written to {', '.join(sorted(parts))} and gave no receipt: its rows would "
                "be committed without being counted. Abort the epoch and run it again"
            )


# Of a topic: the number of its partitions, and the most bytes that a batch may have there.
Shape: TypeAlias = tuple[int, int]


class Claims(ABC):
    """A writer's way to the claim book."""

    @abstractmethod
    async def shape(self, attempt: Attempt, topic: str) -> Shape | None:
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
FindShape: TypeAlias = Callable[[str], Awaitable[Shape | None]]


class LocalClaims(Claims):
    """For writers in the owner's process, in any of its threads: the book belongs to the owner's loop."""

    def __init__(self, book: ClaimBook, join: Join, find_shape: FindShape) -> None:
        self._book = book
        self._join = join
        self._find_shape = find_shape
        self._home = HomeLoop()

    async def shape(self, attempt: Attempt, topic: str) -> Shape | None:
        return await self._home.run(self.shape_here(attempt, topic))

    async def shape_here(self, attempt: Attempt, topic: str) -> Shape | None:
        """In the owner's loop."""
        self._book.require_present(attempt)
        try:
            return await self._find_shape(topic)
        except SemelError as error:
            raise WriteFailed(f"topic {topic!r} could not be looked up: {error}") from error

    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        return await self._home.run(self.take_here(attempt, where, keeps=keeps))

    async def take_here(self, attempt: Attempt, where: TopicPartition, *, keeps: bool) -> int:
        """In the owner's loop."""
        sequence = await self._book.take(attempt, where, keeps=keeps)
        if sequence == 0:
            try:
                await self._join([where])
            except SemelError as error:
                raise WriteFailed(f"{where} did not join the transaction: {error}") from error
        return sequence

    async def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        await self._home.run(self.give_here(attempt, where, next_sequence))

    async def give_here(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        """In the owner's loop."""
        self._book.give(attempt, where, next_sequence)

    async def leave(self, attempt: Attempt) -> None:
        await self._home.run(self.leave_here(attempt))

    async def leave_here(self, attempt: Attempt) -> None:
        """In the owner's loop."""
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
            await self._claims.leave_here(attempt)

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
            return {_SHAPE: await self._claims.shape_here(attempt, topic)}
        where = TopicPartition(topic, _number(request, _PARTITION))
        if _GIVES in request:
            await self._claims.give_here(attempt, where, _number(request, _GIVES))
            return {}
        keeps = request.get(_KEEPS) is True
        return {_SEQUENCE: await self._claims.take_here(attempt, where, keeps=keeps)}


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

    async def shape(self, attempt: Attempt, topic: str) -> Shape | None:
        answer = await self._ask(attempt, topic, {_TOPIC: topic, _SHAPE: True})
        told = answer.get(_SHAPE)
        return None if told is None else (int(told[0]), int(told[1]))

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
            raise WriteFailed(
                f"{attempt} could not claim {what} from the sink's owner at {self._service.address}: "
                f"{str(error) or type(error).__name__}. Is the owner alive, and can this machine reach it? "
                "`share(host)` says where it listens"
            ) from error
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
