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

`ClaimBook` holds the rules, and belongs to the owner's loop. How writers reach it is said in
`semel.sinks.kafka.claim_service`.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from semel.client.metadata import TopicPartition
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
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
        # Why the present epoch can only be aborted, if so.
        self._spoiled: str | None = None

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
