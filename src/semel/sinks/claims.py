"""Claims: one attempt a task, and one writer a partition, in an epoch of a shared transaction.

All writers of a Kafka epoch have one producer id and epoch. Two of them that write to one partition are taken
for one that repeats itself: rows are lost and doubled, and all of them are acknowledged. So a writer claims a
partition from the owner before it sends to it. Rules:

- A partition is claimed once in an epoch, and a task has one writer in it. A writer is known by a random
  name of its own: a retried stage counts its attempts from 0 again, so numbers do not tell writers apart.
- Whoever comes second is refused, and the epoch is spoiled: rows of the first may be there that no receipt
  counts. It is aborted and run again under another producer epoch.
- A claim of another run or epoch is refused and spoils nothing: it is a zombie's, and whatever it sends is
  refused by the broker.
- What was claimed must be covered by the receipts, and nothing else: otherwise the epoch is not committed.

`ClaimBook` holds the rules, without I/O. Writers in this process ask it through `LocalClaims`, others over a
socket: one line of JSON each way, with the run's secret (`ClaimService`, `RemoteClaims`).
"""

import asyncio
import hmac
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from semel.client.metadata import Address, TopicPartition
from semel.errors import ConfigError, SemelError
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Place, Receipt

TOKEN_BYTES: Final = 32
MAX_LINE_BYTES: Final = 64 * 1024
# A topic's name takes up to 249 bytes: this many partitions of one topic always fit in a line.
MAX_PARTITIONS_A_CLAIM: Final = 4_000
MAX_CONNECTIONS: Final = 4_096
# A connection that says nothing before its first claim is not a writer's.
FIRST_LINE_TIMEOUT_S: Final = 10.0
CLAIM_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(slots=True, frozen=True)
class Claimant:
    """One writer: an attempt at a task, told apart from all others by a random name."""

    place: Place
    task: int
    attempt: str
    writer: str

    def __str__(self) -> str:
        return f"attempt {self.attempt} of task {self.task}"


class ClaimBook:
    """Who writes where in the present epoch."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._writers: dict[int, Claimant] = {}
        self._holders: dict[TopicPartition, Claimant] = {}
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

    def claim(self, claimant: Claimant, partitions: Iterable[TopicPartition]) -> str | None:
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
    async def claim(self, claimant: Claimant, partitions: list[TopicPartition]) -> None:
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

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the owner's loop."""
        return asyncio.get_running_loop() is self._loop

    async def claim(self, claimant: Claimant, partitions: list[TopicPartition]) -> None:
        if self.is_here:
            await self.claim_here(claimant, partitions)
            return
        done = asyncio.run_coroutine_threadsafe(self.claim_here(claimant, partitions), self._loop)
        await asyncio.wrap_future(done)

    async def claim_here(self, claimant: Claimant, partitions: list[TopicPartition]) -> None:
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


class ClaimAddress(NamedTuple):
    """Where other processes claim, and the secret that lets them. Part of a plan, and pickled with it."""

    address: Address
    token: str


class ClaimService:
    """Claims over TCP, for writers in other processes; it lives in the owner's loop."""

    def __init__(self, claims: LocalClaims) -> None:
        self._claims = claims
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> ClaimAddress:
        """Listens on a free port of this host (its address as the writers see it)."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=MAX_LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return ClaimAddress(Address(host, port), self._token)

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(writer)
        try:
            timeout_s: float | None = FIRST_LINE_TIMEOUT_S
            while True:
                async with asyncio.timeout(timeout_s):
                    line = await reader.readline()
                if not line:
                    return
                answer = await self._answer(line)
                if answer is None:
                    return  # not one of ours, and told nothing
                writer.write(json.dumps({"refused": answer}).encode() + b"\n")
                await writer.drain()
                timeout_s = None
        except (OSError, ValueError, TimeoutError):
            return  # gone, too long a line, or silent
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, line: bytes) -> str | None:
        """Empty if granted, the reason if refused, None if it is no claim of this run."""
        try:
            fields = json.loads(line)
            token = str(fields["token"])
            claimant = Claimant(
                Place(str(fields["run"]), int(fields["epoch"]), int(fields["turn"])),
                int(fields["task"]),
                str(fields["attempt"]),
                str(fields["writer"]),
            )
            topic = str(fields["topic"])
            partitions = [TopicPartition(topic, int(partition)) for partition in fields["partitions"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not partitions:
            return None
        try:
            await self._claims.claim_here(claimant, partitions)
        except WriteFailed as error:
            return str(error)
        return ""


class RemoteClaims(Claims):
    """For writers in other processes: one connection for as long as the writer lives."""

    def __init__(self, service: ClaimAddress) -> None:
        self._service = service
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def claim(self, claimant: Claimant, partitions: list[TopicPartition]) -> None:
        by_topic: dict[str, list[int]] = {}
        for where in partitions:
            by_topic.setdefault(where.topic, []).append(where.partition)
        for topic, indexes in by_topic.items():
            for start in range(0, len(indexes), MAX_PARTITIONS_A_CLAIM):
                await self._claim(claimant, topic, indexes[start : start + MAX_PARTITIONS_A_CLAIM])

    async def _claim(self, claimant: Claimant, topic: str, partitions: list[int]) -> None:
        asked = {
            "token": self._service.token,
            "run": claimant.place.run,
            "epoch": claimant.place.epoch,
            "turn": claimant.place.turn,
            "task": claimant.task,
            "attempt": claimant.attempt,
            "writer": claimant.writer,
            "topic": topic,
            "partitions": partitions,
        }
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                line = await self._ask(json.dumps(asked).encode() + b"\n")
            refusal = json.loads(line)["refused"]
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise WriteFailed(
                f"{claimant} could not claim its partitions of {topic!r} from the sink's owner at "
                f"{self._service.address}: {error or type(error).__name__}. Is the owner alive, and can this "
                "machine reach it? `share(host)` says where it listens"
            ) from error
        if refusal:
            raise WriteFailed(str(refusal))

    async def _ask(self, line: bytes) -> bytes:
        if self._writer is None or self._reader is None:
            host, port = self._service.address
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._reader, self._writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        self._writer.write(line)
        await self._writer.drain()
        answer = await self._reader.readline()
        if not answer:
            raise ConnectionResetError("the owner closed the connection: it knows no such run")
        return answer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None


def require_shared(service: ClaimAddress | None) -> ClaimAddress:
    """The address that a plan takes along to other processes."""
    if service is None:
        raise ConfigError(
            "this plan is for writers in the owner's process: call the sink's `share()` before `open`, so "
            "that writers elsewhere can claim their partitions"
        )
    return service
