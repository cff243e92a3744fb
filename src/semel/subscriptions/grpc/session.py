"""One subscriber's stream: what it may say, when, and what it is answered.

Rules:

- A delivery is *lent* from when it is put into the outbox until its end is: then its credit is free again,
  and its id is remembered for a while, so that a late message about it is told what became of it.
- Messages are handled in the order in which they came. What takes time runs beside: statements in parallel,
  each started in its turn, and an Ack after the statements before it. From the Ack on nothing is taken for a
  delivery.
- Every Statement is answered once (Applied, Refused), every delivery ends once (Committed, RolledBack,
  InDoubt).
- Nothing is dealt while something is unsent, so a subscriber that does not read is given no more. Nothing is
  read while too much is unsent or under way, so one that only sends is held up by its own answers.
- The end of a stream takes back what is not acknowledged. What is acknowledged goes on without it.
- A subscriber that closes its side leaves in peace: nothing is blamed. One that is cut off may have been
  killed by what it had, and only that is blamed, not what was never handed to its stream. gRPC may tell of a
  stream that was cut as if its subscriber had closed its side. Writing tells them apart, so a subscriber that
  leaves is told first that its open deliveries are rolled back: where that cannot be written, it was cut off.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Final

from semel.errors import SemelError
from semel.subscriptions.delivery import TIMED_OUT, Dealt, Transaction
from semel.subscriptions.errors import (
    DeliveryLostError,
    DeliveryStateError,
    SubscriptionClosedError,
    TransactionRejectedError,
)
from semel.subscriptions.grpc import subscriptions_pb2 as pb
from semel.subscriptions.grpc.groups import Gateway, GatewayGroup
from semel.subscriptions.grpc.terms import MAX_CREDITS, settings_of
from semel.subscriptions.options import MAX_STATEMENTS
from semel.subscriptions.states import DeliveryState
from semel.subscriptions.subscription import Channel
from semel.version import __version__
from semel.wire.records import Headers

log = logging.getLogger("semel.gateway")

MAX_UNSENT: Final = 1_000
"""Messages that wait to be sent; the stream is not read while there are more."""
MAX_UNDER_WAY: Final = 1_000
"""Statements, acknowledgements and refusals of one stream that are being worked on."""
MAX_REMEMBERED: Final = 1_000
"""Ended deliveries of one stream whose end is known."""
FINISH_TIMEOUT_S: Final = 30.0
"""How long the end of a stream waits for acknowledgements that are being committed."""
MAX_REASON_CHARACTERS: Final = 1_000

GONE: Final = "its subscriber has gone"
LEFT: Final = "its subscriber left"


class Malformed:
    """A message that could not be read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


Request = pb.SubscribeRequest | Malformed
Read = Callable[[], Awaitable[Request | None]]
"""The next message; None when the subscriber has closed its side."""
Write = Callable[[pb.SubscribeResponse], Awaitable[None]]


class Lent:
    """A delivery that this subscriber has."""

    __slots__ = (
        "dealt",
        "delivery_id",
        "is_ending",
        "is_handed_over",
        "is_told",
        "statement_ids",
        "transaction",
    )

    def __init__(self, delivery_id: int, dealt: Dealt) -> None:
        self.delivery_id = delivery_id
        self.dealt = dealt
        self.transaction: Transaction | None = None
        self.statement_ids: set[int] = set()
        self.is_ending = False  # its Ack or Nack has come, and is answered in time
        self.is_handed_over = False  # its subscriber may have seen it
        self.is_told = False  # its end is in the outbox, or was sent


class StreamChannel(Channel):
    """A channel that tells when a delivery comes to its end."""

    def __init__(self, group: GatewayGroup, on_end: Callable[[Dealt], None]) -> None:
        super().__init__(group.subscription)
        self._on_end = on_end

    def discard(self, dealt: Dealt) -> None:
        super().discard(dealt)
        self._on_end(dealt)


class Session:
    """A stream, after its Setup."""

    def __init__(self, gateway: Gateway, group: GatewayGroup, setup: pb.Setup, peer: str) -> None:
        self.name = setup.client_id or peer
        self._gateway = gateway
        self._group = group
        self._channel = StreamChannel(group, self._came_back)
        self._credits = min(setup.credits, MAX_CREDITS)
        self._batch_size = max(setup.batch_size, 1)
        self._lent: dict[int, Lent] = {}
        self._ids: dict[Dealt, int] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()
        self._outbox: deque[pb.SubscribeResponse] = deque()
        self._unsent = asyncio.Event()
        self._has_room = asyncio.Event()
        self._changed = asyncio.Event()  # credits, what is lent, or what is unsent
        self._under_way = 0
        self._is_finished = False

    async def converse(self, read: Read, write: Write, warnings: list[str]) -> None:
        """Until the subscriber has left. Raises SemelError if the deliveries have come to an end instead."""
        self._greet(warnings)
        reader = asyncio.create_task(self._read(read), name=f"reads {self.name}")
        dealer = asyncio.create_task(self._deal(), name=f"deals to {self.name}")
        writer = asyncio.create_task(self._write(write), name=f"writes to {self.name}")
        tasks = (reader, dealer, writer)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                return  # the stream is broken, and about to be cancelled
            dealer.cancel()
            if not await self._has_left(writer):
                return  # it was cut off
            await self._finish(writer)
            for task in (reader, dealer):
                await _result(task)
        finally:
            for task in tasks:
                task.cancel()
            # Whatever was read has begun when these have ended: an Ack among it is as good as done.
            await asyncio.gather(*tasks, return_exceptions=True)
            self._take_back_all()

    def _greet(self, warnings: list[str]) -> None:
        options = self._group.subscription.options
        self._send(
            pb.SubscribeResponse(
                ready=pb.Ready(
                    settings=settings_of(options),
                    max_statements=MAX_STATEMENTS,
                    max_credits=MAX_CREDITS,
                    version=__version__,
                )
            )
        )
        for warning in warnings:
            self._warn(0, pb.PROBLEM_OTHER_SETTING, warning)

    async def _has_left(self, writer: "asyncio.Task[None]") -> bool:
        """Tells the end of what is open; False if that cannot be written, since the stream was cut."""
        for lent in self._lent.values():
            if lent.dealt.state is DeliveryState.OPEN and not lent.is_ending:
                lent.is_told = True
                self._send(_rolled_back(lent, pb.CAUSE_LOST, LEFT))
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                while self._outbox and not writer.done():
                    await self._change()
        return not writer.done()

    async def _finish(self, writer: "asyncio.Task[None]") -> None:
        """Answers what is acknowledged, gives back the rest without blame, and sends all of it."""
        self._channel.close(LEFT, counts=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                while self._lent or self._under_way:
                    await self._change()
        self._is_finished = True
        self._unsent.set()
        await asyncio.wait([writer], timeout=FINISH_TIMEOUT_S)

    def _take_back_all(self) -> None:
        """The stream is gone: what it did not acknowledge is rolled back at once."""
        suspects = [
            lent.dealt
            for lent in self._lent.values()
            if lent.is_handed_over and lent.dealt.state is DeliveryState.OPEN
        ]
        is_shared = len(suspects) > 1
        if is_shared:
            self._group.suspect(suspects)
        if suspects:
            log.info("%s is gone, with %d deliveries of %r", self.name, len(suspects), self._group.group_id)
        for dealt in list(self._channel.open):
            dealt.take_back(GONE, counts=not is_shared and dealt in suspects)
        self._channel.close(counts=False)

    # Dealing

    async def _deal(self) -> None:
        while True:
            while self._outbox or len(self._lent) >= self._credits:
                await self._change()
            dealt = await self._take()
            suspicion = self._group.suspicion(dealt)
            while suspicion and self._lent and dealt.state is DeliveryState.OPEN:
                await self._change()
            if dealt.state is not DeliveryState.OPEN:
                continue
            lent = self._lend(dealt, suspicion)
            while suspicion and lent.delivery_id in self._lent:
                await self._change()

    async def _take(self) -> Dealt:
        if self._batch_size == 1:
            return await self._channel.take()
        return await self._channel.take_batch(self._batch_size)

    def _lend(self, dealt: Dealt, suspicion: int) -> Lent:
        lent = Lent(next(self._gateway.delivery_ids), dealt)
        self._lent[lent.delivery_id] = lent
        self._ids[dealt] = lent.delivery_id
        self._send(pb.SubscribeResponse(delivery=_delivery(lent, suspicion)))
        return lent

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _came_back(self, dealt: Dealt) -> None:
        """The subscription is done with a delivery. If nobody here waits for that, it was taken back."""
        delivery_id = self._ids.get(dealt)
        if delivery_id is None:
            return
        lent = self._lent[delivery_id]
        if not lent.is_ending:
            reason = dealt.taken_back_because
            cause = pb.CAUSE_TIMED_OUT if reason == TIMED_OUT else pb.CAUSE_LOST
            self._roll_back(lent, cause, reason)

    def _roll_back(self, lent: Lent, cause: pb.Cause, reason: str) -> None:
        self._end(lent, _rolled_back(lent, cause, reason), f"rolled back: {reason}")

    def _end(self, lent: Lent, message: pb.SubscribeResponse, became: str) -> None:
        del self._lent[lent.delivery_id]
        del self._ids[lent.dealt]
        self._ended[lent.delivery_id] = became
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if lent.dealt.taken_back_because != GONE:
            self._group.clear(lent.dealt)
        if not lent.is_told:
            self._send(message)
        self._changed.set()

    # Sending and reading

    def _send(self, message: pb.SubscribeResponse) -> None:
        self._outbox.append(message)
        self._unsent.set()

    def _warn(self, delivery_id: int, problem: pb.Problem, reason: str) -> None:
        warning = pb.Warning(delivery_id=delivery_id, problem=problem, reason=_cut(reason))
        self._send(pb.SubscribeResponse(warning=warning))

    async def _write(self, write: Write) -> None:
        try:
            while True:
                while self._outbox:
                    self._hand_over(self._outbox[0])
                    await write(self._outbox[0])
                    self._outbox.popleft()
                    self._has_room.set()
                self._changed.set()
                if self._is_finished:
                    return
                self._unsent.clear()
                await self._unsent.wait()
        finally:
            self._changed.set()

    def _hand_over(self, message: pb.SubscribeResponse) -> None:
        """From here on nobody can tell whether the subscriber has seen a delivery."""
        if message.HasField("delivery"):
            lent = self._lent.get(message.delivery.delivery_id)
            if lent is not None:
                lent.is_handed_over = True

    async def _read(self, read: Read) -> None:
        while True:
            while len(self._outbox) >= MAX_UNSENT or self._under_way >= MAX_UNDER_WAY:
                self._has_room.clear()
                await self._has_room.wait()
            request = await read()
            if request is None:
                return
            self.handle(request)

    # What a subscriber says

    def handle(self, request: Request) -> None:
        if isinstance(request, Malformed):
            self._warn(0, pb.PROBLEM_MALFORMED, f"the message was dropped: {request.reason}")
            return
        kind = request.WhichOneof("message")
        if kind == "statement":
            self._state(request.statement)
        elif kind == "ack":
            self._ack(request.ack)
        elif kind == "begin":
            self._begin(request.begin)
        elif kind == "nack":
            self._nack(request.nack)
        elif kind == "credits":
            self._credits = min(request.credits.count, MAX_CREDITS)
            self._changed.set()
        elif kind == "setup":
            self._warn(0, pb.PROBLEM_REPEATED, "Setup comes once, as the first message: this one was dropped")
        else:
            self._warn(0, pb.PROBLEM_MALFORMED, "the message was dropped: nothing in it is known here")

    def _begin(self, begin: pb.Begin) -> None:
        lent = self._open(begin.delivery_id, "Begin")
        if lent is None:
            return
        if lent.transaction is not None:
            self._warn(begin.delivery_id, pb.PROBLEM_REPEATED, "the transaction has been begun already")
            return
        lent.transaction = lent.dealt.transaction()

    def _ack(self, ack: pb.Ack) -> None:
        lent = self._open(ack.delivery_id, "Ack")
        if lent is not None:
            lent.is_ending = True
            self._start(self._acknowledge(lent))

    def _nack(self, nack: pb.Nack) -> None:
        lent = self._open(nack.delivery_id, "Nack")
        if lent is not None:
            lent.is_ending = True
            delay_ms = nack.delay_ms if nack.HasField("delay_ms") else None
            self._start(self._give_back(lent, nack.reason, delay_ms))

    def _open(self, delivery_id: int, what: str) -> Lent | None:
        """The delivery that a message is about; a warning if there is none, or none any more."""
        lent = self._lent.get(delivery_id)
        problem, reason = self._objection(lent, delivery_id)
        if problem == pb.PROBLEM_UNSPECIFIED:
            return lent
        self._warn(delivery_id, problem, f"{what} was dropped: {reason}")
        return None

    def _objection(self, lent: Lent | None, delivery_id: int) -> tuple[pb.Problem, str]:
        """What is wrong with a message about a delivery, if anything."""
        if lent is None:
            became = self._ended.get(delivery_id)
            if became is None:
                return pb.PROBLEM_UNKNOWN_DELIVERY, f"delivery {delivery_id} is not open on this stream"
            return pb.PROBLEM_TOO_LATE, f"delivery {delivery_id} was {became}"
        if lent.is_ending:
            return pb.PROBLEM_TOO_LATE, f"delivery {delivery_id} was acknowledged, or given back, before"
        if lent.dealt.state is not DeliveryState.OPEN:
            return pb.PROBLEM_LOST, f"{lent.dealt} was taken back: {lent.dealt.taken_back_because}"
        return pb.PROBLEM_UNSPECIFIED, ""

    def _state(self, statement: pb.Statement) -> None:
        lent = self._lent.get(statement.delivery_id)
        problem, reason = self._objection(lent, statement.delivery_id)
        if problem == pb.PROBLEM_UNSPECIFIED and lent is not None:
            problem, reason = _statement_objection(lent, statement)
        if problem != pb.PROBLEM_UNSPECIFIED or lent is None or lent.transaction is None:
            self._refuse(statement, problem, reason, rejects_transaction=False)
            return
        lent.statement_ids.add(statement.statement_id)
        self._start(self._publish(lent.transaction, statement))

    def _refuse(
        self, statement: pb.Statement, problem: pb.Problem, reason: str, *, rejects_transaction: bool
    ) -> None:
        refused = pb.Refused(
            delivery_id=statement.delivery_id,
            statement_id=statement.statement_id,
            problem=problem,
            reason=_cut(f"the statement was dropped: {reason}"),
            rejects_transaction=rejects_transaction,
        )
        self._send(pb.SubscribeResponse(refused=refused))

    # What takes time

    def _start(self, work: Coroutine[object, object, None]) -> None:
        self._under_way += 1
        self._group.start(self._run(work))

    async def _run(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        finally:
            self._under_way -= 1
            self._has_room.set()
            self._changed.set()

    async def _publish(self, transaction: Transaction, statement: pb.Statement) -> None:
        try:
            placed = await transaction.publish(
                statement.topic,
                statement.value if statement.HasField("value") else None,
                key=statement.key if statement.HasField("key") else None,
                partition=statement.partition if statement.HasField("partition") else None,
                headers=_headers(statement),
                timestamp_ms=statement.timestamp_ms if statement.HasField("timestamp_ms") else None,
            )
        except SemelError as error:
            is_rejected = transaction.failure is not None or isinstance(error, DeliveryLostError)
            self._refuse(statement, _problem_of(error), str(error), rejects_transaction=is_rejected)
            return
        applied = pb.Applied(
            delivery_id=statement.delivery_id,
            statement_id=statement.statement_id,
            partition=placed.partition,
            offset=placed.offset,
        )
        self._send(pb.SubscribeResponse(applied=applied))

    async def _acknowledge(self, lent: Lent) -> None:
        try:
            await lent.dealt.ack()
        except TransactionRejectedError as error:
            self._roll_back(lent, pb.CAUSE_REJECTED, str(error))
        except (SemelError, asyncio.CancelledError) as error:
            # The delivery was open when its Ack came, so the commit may have been sent.
            reason = str(error) or "the gateway stops"
            in_doubt = pb.InDoubt(delivery_id=lent.delivery_id, reason=_cut(reason))
            self._end(lent, pb.SubscribeResponse(in_doubt=in_doubt), f"lost while it was committed: {reason}")
        else:
            committed = pb.Committed(delivery_id=lent.delivery_id)
            self._end(lent, pb.SubscribeResponse(committed=committed), "committed already")

    async def _give_back(self, lent: Lent, reason: str, delay_ms: int | None) -> None:
        # Whatever fails after the roll-back, or instead of it, nothing of it can be committed any more.
        with suppress(SemelError, asyncio.CancelledError):
            await lent.dealt.nack(reason, delay_ms=delay_ms)
        self._roll_back(lent, pb.CAUSE_NACKED, reason or "nack")


async def _result(task: "asyncio.Task[None]") -> None:
    """Raises what ended a task, unless that was us."""
    with suppress(asyncio.CancelledError):
        if task.done():
            task.result()


def _statement_objection(lent: Lent, statement: pb.Statement) -> tuple[pb.Problem, str]:
    if lent.transaction is None:
        return pb.PROBLEM_NO_TRANSACTION, "no Begin came for its delivery before it"
    if statement.statement_id in lent.statement_ids:
        return pb.PROBLEM_REPEATED, f"statement id {statement.statement_id} was used before"
    if not statement.topic:
        return pb.PROBLEM_NOT_ALLOWED, "it names no topic"
    if statement.partition < 0 or statement.timestamp_ms < 0:
        return pb.PROBLEM_NOT_ALLOWED, "its partition, or its timestamp, is negative"
    return pb.PROBLEM_UNSPECIFIED, ""


def _problem_of(error: SemelError) -> pb.Problem:
    if isinstance(error, DeliveryStateError):
        return pb.PROBLEM_TOO_LATE
    if isinstance(error, DeliveryLostError | SubscriptionClosedError):
        return pb.PROBLEM_LOST
    return pb.PROBLEM_NOT_ALLOWED


def _rolled_back(lent: Lent, cause: pb.Cause, reason: str) -> pb.SubscribeResponse:
    rolled_back = pb.RolledBack(delivery_id=lent.delivery_id, cause=cause, reason=_cut(reason))
    return pb.SubscribeResponse(rolled_back=rolled_back)


def _delivery(lent: Lent, suspicion: int) -> pb.Delivery:
    dealt = lent.dealt
    return pb.Delivery(
        delivery_id=lent.delivery_id,
        topic=dealt.topic,
        partition=dealt.partition,
        attempt=max(held.attempt for held in dealt.held) + suspicion,
        records=[
            pb.Record(
                offset=held.offset,
                key=held.shown.key,
                value=held.shown.value,
                headers=[pb.Header(key=key, value=value) for key, value in held.shown.headers],
                timestamp_ms=held.shown.timestamp,
            )
            for held in dealt.held
        ],
    )


def _headers(statement: pb.Statement) -> Headers:
    return tuple(
        (header.key, header.value if header.HasField("value") else None) for header in statement.headers
    )


def _cut(reason: str) -> str:
    return reason[:MAX_REASON_CHARACTERS]
