"""Claims: one attempt a task, and one writer a partition, in an epoch of a shared transaction.

All writers of a Kafka epoch have one producer id and epoch. Two of them that write to one partition are taken
for one that repeats itself: rows are lost and doubled, and all of them are acknowledged. So a writer claims a
partition from the owner before it sends to it. Rules:

- A partition is claimed once in an epoch, and a task has one writer in it, known by a random name of its own.
- Whoever comes second is refused, and the epoch is spoiled: rows of the first may be there that no receipt
  counts. It is aborted and run again under another producer epoch.
- A claim of another run or epoch is refused and spoils nothing: it is a zombie's, and whatever it sends is
  refused by the broker.
- What was claimed must be covered by the receipts, and nothing else: otherwise the epoch is not committed.

`ClaimBook` holds the rules, without I/O. Writers in this process ask it through `LocalClaims`, others over a
socket: one message each way (`ClaimService`, `RemoteClaims`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from semel.client.loop_thread import run_in
from semel.client.metadata import TopicPartition
from semel.errors import SemelError
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import Channel, OwnerService, ServiceAddress, dial

# A topic's name takes up to 249 bytes: this many partitions of one topic always fit in a message.
MAX_PARTITIONS_A_CLAIM: Final = 4_000
CLAIM_TIMEOUT_S: Final = 30.0


class ClaimBook:
    """Who writes where in the present epoch."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._writers: dict[int, Attempt] = {}
        self._holders: dict[TopicPartition, Attempt] = {}
        self._spoiled: str | None = None

    @property
    def spoiled(self) -> str | None:
        """Why the present epoch can only be aborted, if so."""
        return self._spoiled

    def open(self, place: Place) -> None:
        """A new epoch: nothing is claimed."""
        self._place = place
        self._writers, self._holders, self._spoiled = {}, {}, None

    def close(self) -> None:
        """The epoch is over: every claim is refused from here on."""
        self._place = None

    def claim(self, claimant: Attempt, partitions: Iterable[TopicPartition]) -> str | None:
        """Claims all of them; the reason if one is refused. Idempotent for the same writer."""
        if claimant.place != self._place:
            return f"{claimant} is of {claimant.place}, which is over: its rows will not be committed"
        first = self._writers.setdefault(claimant.task, claimant)
        if first != claimant:
            return self._spoil(
                f"task {claimant.task} was tried twice (attempts {first.attempt} and "
                f"{claimant.attempt}), and the first may have written already"
            )
        for where in partitions:
            holder = self._holders.setdefault(where, claimant)
            if holder != claimant:
                return self._spoil(
                    f"{claimant} and {holder} both have rows for {where}: each partition is written by one "
                    "task; shuffle rows by their partition, or write them in one task"
                )
        return None

    def _spoil(self, reason: str) -> str:
        self._spoiled = self._spoiled or reason
        return f"{reason}. The epoch is spoiled: abort it and run it again"

    def check_covered(self, receipts: Iterable[Receipt]) -> None:
        """Raises unless the receipts account for exactly what was claimed."""
        if self._spoiled is not None:
            raise CommitFailed(f"{self._spoiled}. Abort the epoch and run it again")
        claimed: dict[int, set[str]] = {}
        for where, holder in self._holders.items():
            claimed.setdefault(holder.task, set()).add(str(where))
        for receipt in receipts:
            writer = self._writers.get(receipt.task)
            if set(receipt.parts) != claimed.pop(receipt.task, set()) or (
                writer is not None and writer.attempt != receipt.attempt
            ):
                raise CommitFailed(
                    f"the receipt of attempt {receipt.attempt} of task {receipt.task} does not account for "
                    "what the task has written: a second attempt took its place. Abort and run it again"
                )
        for task, parts in claimed.items():
            raise CommitFailed(
                f"task {task} has written to {', '.join(sorted(parts))} and gave no receipt: its rows would "
                "be committed without being counted. Abort the epoch and run it again"
            )


class Claims(ABC):
    """A writer's way to the claim book."""

    @abstractmethod
    async def claim(self, claimant: Attempt, partitions: list[TopicPartition]) -> None:
        """Returns if they are this writer's; raises WriteFailed otherwise, and nothing may be sent."""

    @abstractmethod
    def close(self) -> None:
        """Lets go. Idempotent."""


# Takes what was claimed into the owner's transaction: version 1 needs that before the first batch.
Join: TypeAlias = Callable[[Iterable[TopicPartition]], Awaitable[None]]


class LocalClaims(Claims):
    """For writers in the owner's process, in any of its threads: the book belongs to the owner's loop."""

    def __init__(self, book: ClaimBook, join: Join) -> None:
        self._book = book
        self._join = join
        self._loop = asyncio.get_running_loop()

    async def claim(self, claimant: Attempt, partitions: list[TopicPartition]) -> None:
        await run_in(self._loop, self.claim_here(claimant, partitions))

    async def claim_here(self, claimant: Attempt, partitions: list[TopicPartition]) -> None:
        """In the owner's loop."""
        refusal = self._book.claim(claimant, partitions)
        if refusal is not None:
            raise WriteFailed(refusal)
        try:
            await self._join(partitions)
        except SemelError as error:
            raise WriteFailed(f"{partitions[0]} did not join the transaction: {error}") from error

    def close(self) -> None:
        pass


class ClaimService:
    """Claims over TCP, for writers in other processes; it lives in the owner's loop."""

    def __init__(self, claims: LocalClaims) -> None:
        self._claims = claims
        self._service = OwnerService(self._serve)

    async def start(self, host: str) -> ServiceAddress:
        return await self._service.start(host)

    async def stop(self) -> None:
        await self._service.stop()

    async def _serve(self, fields: Mapping[str, Any], channel: Channel) -> None:
        """Each message is a claim, the first one, too."""
        while True:
            await channel.say({"refused": await self._answer(Attempt.parse(fields), _claimed(fields))})
            fields = await channel.hear()

    async def _answer(self, claimant: Attempt, partitions: list[TopicPartition]) -> str:
        """Empty if granted, the reason if refused."""
        try:
            await self._claims.claim_here(claimant, partitions)
        except WriteFailed as error:
            return str(error)
        return ""


def _claimed(fields: Mapping[str, Any]) -> list[TopicPartition]:
    try:
        partitions = [TopicPartition(str(fields["topic"]), int(index)) for index in fields["partitions"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no claim: {error}") from error
    if not partitions:
        raise ValueError("this claims nothing")
    return partitions


class RemoteClaims(Claims):
    """For writers in other processes: one connection for as long as the writer lives."""

    def __init__(self, service: ServiceAddress) -> None:
        self._service = service
        self._channel: Channel | None = None

    async def claim(self, claimant: Attempt, partitions: list[TopicPartition]) -> None:
        by_topic: dict[str, list[int]] = {}
        for where in partitions:
            by_topic.setdefault(where.topic, []).append(where.partition)
        for topic, indexes in by_topic.items():
            for start in range(0, len(indexes), MAX_PARTITIONS_A_CLAIM):
                await self._claim(claimant, topic, indexes[start : start + MAX_PARTITIONS_A_CLAIM])

    async def _claim(self, claimant: Attempt, topic: str, partitions: list[int]) -> None:
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                answer = await self._ask(
                    {**claimant.fields(), "topic": topic, "partitions": partitions},
                )
            refusal = answer["refused"]
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise WriteFailed(
                f"{claimant} could not claim its partitions of {topic!r} from the sink's owner at "
                f"{self._service.address}: {error or type(error).__name__}. Is the owner alive, and can this "
                "machine reach it? `share(host)` says where it listens"
            ) from error
        if refusal:
            raise WriteFailed(str(refusal))

    async def _ask(self, claim: dict[str, object]) -> dict[str, Any]:
        if self._channel is None:
            self._channel = await dial(self._service, claim)
        else:
            await self._channel.say(claim)
        return await self._channel.hear()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
