"""What passes between the owner of an epoch and its writers, all of it small and made to be pickled."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from semel.sinks.errors import CommitFailed


class Origin(NamedTuple):
    """Where an epoch's rows come from: the query, and a digest of the source's end offsets.

    An epoch that is run again must have the same origin as the one that the marker remembers. A plain
    program whose epochs have no source leaves both empty.
    """

    query_id: str = ""
    offsets_digest: str = ""


NO_ORIGIN: Final = Origin()

WRITER_NAME_BYTES: Final = 8


class Place(NamedTuple):
    """One try at one epoch in one run of one sink; what a receipt must agree with.

    `turn` counts what the run has begun: an epoch that was aborted is begun again in another turn, in which
    nothing of a writer of the turn before counts.
    """

    run: str
    epoch: int
    turn: int

    def __str__(self) -> str:
        return f"run {self.run}, epoch {self.epoch}, turn {self.turn}"


@dataclass(slots=True, frozen=True)
class Attempt:
    """One writer: an attempt at a task, told apart from all others by a random name.

    A retried stage counts its attempts from 0 again, so numbers do not tell writers apart.
    """

    place: Place
    task: int
    attempt: str
    writer: str

    @classmethod
    def new(cls, place: Place, task: int, attempt: str) -> Self:
        return cls(place, task, attempt, secrets.token_hex(WRITER_NAME_BYTES))

    def __str__(self) -> str:
        return f"attempt {self.attempt} of task {self.task}"

    def fields(self) -> dict[str, object]:
        """As JSON has it."""
        return {**self.place._asdict(), "task": self.task, "attempt": self.attempt, "writer": self.writer}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """The other way; ValueError if it is none."""
        try:
            place = Place(str(fields["run"]), int(fields["epoch"]), int(fields["turn"]))
            return cls(place, int(fields["task"]), str(fields["attempt"]), str(fields["writer"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no attempt at a task: {error}") from error


@dataclass(slots=True, frozen=True)
class Receipt:
    """A writer's word that its rows are in the transaction, or staged, and how many they are.

    `parts` counts them by what only one writer may touch (Kafka's partitions) or by where they wait (a
    staging table): text to number of rows.
    """

    place: Place
    task: int
    attempt: str
    rows: int
    bytes: int
    dead_letters: int = 0
    parts: dict[str, int] = field(default_factory=dict)


def check_receipts(place: Place, receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts in order of their tasks, if all are of this run and epoch, and each task gave one."""
    by_task: dict[int, Receipt] = {}
    for receipt in receipts:
        if receipt.place != place:
            raise CommitFailed(
                f"task {receipt.task} gave a receipt of {receipt.place}; "
                f"this is {place}. "
                f"A late writer's work is never committed"
            )
        if receipt.task in by_task:
            raise CommitFailed(
                f"task {receipt.task} gave two receipts in epoch {place.epoch}: hand in that of one attempt"
            )
        by_task[receipt.task] = receipt
    return [by_task[task] for task in sorted(by_task)]
