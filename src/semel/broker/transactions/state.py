"""The state of each transactional id, and the table of its transitions.

Only `apply` of an entry changes anything here; the handlers beside this module look and decide. Prepare
states are passed through within one entry: on one node a transaction is prepared and completed in one
journal group.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from semel.broker.transaction_messages import (
    JoinedPartition,
    TransactionEnded,
    TransactionForgotten,
    TransactionIdentified,
    TransactionJoined,
    TransactionPart,
)

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
MAX_EPOCH: Final = 32_766
"""The last epoch that a producer is given; one more is left for the markers that end its last transaction."""

PartitionKey = tuple[bytes, int]
"""A partition by the id of its topic: a topic that is made anew under the same name is another one."""


class State(IntEnum):
    """Where a transactional id stands, numbered as Kafka numbers it."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def label(self) -> str:
        """The name that clients and tools know."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_ONGOING: Final = State.ONGOING
"""By a name of its own, since every request asks for it: an enum is slow to find its members."""
_AT_REST: Final = frozenset({State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT})

ALLOWED_FROM: Final[dict[State, frozenset[State]]] = {
    State.EMPTY: _AT_REST,
    State.ONGOING: _AT_REST | {State.ONGOING},
    State.PREPARE_COMMIT: frozenset({State.ONGOING}),
    State.PREPARE_ABORT: _AT_REST | {State.ONGOING, State.PREPARE_EPOCH_FENCE},
    State.COMPLETE_COMMIT: frozenset({State.PREPARE_COMMIT}),
    State.COMPLETE_ABORT: frozenset({State.PREPARE_ABORT}),
    State.PREPARE_EPOCH_FENCE: frozenset({State.ONGOING}),
    State.DEAD: _AT_REST,
}


class Transaction:
    """One transactional id: the identity it has, and the transaction that may be open under it."""

    __slots__ = (
        "ended_by_broker",
        "epoch",
        "groups",
        "last_epoch",
        "last_producer_id",
        "open_epoch",
        "open_producer_id",
        "partitions",
        "principal",
        "producer_id",
        "started_ms",
        "state",
        "timeout_ms",
        "transactional_id",
        "two_phase",
        "updated_ms",
    )

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.producer_id = NO_PRODUCER_ID
        self.epoch = NO_EPOCH
        self.last_producer_id = NO_PRODUCER_ID
        """The producer id before the last raise of the epoch ..."""
        self.last_epoch = NO_EPOCH
        """... and the epoch: -1 if whoever had it was fenced and must not come back with it."""
        self.timeout_ms = 0
        self.two_phase = False
        self.principal = ""
        self.state = State.EMPTY
        self.ended_by_broker = False
        """The last transaction was aborted by the broker, not by its client."""
        self.open_producer_id = NO_PRODUCER_ID
        self.open_epoch = NO_EPOCH
        """The identity that the open transaction is written under; an older one if it was kept (KIP-939)."""
        self.started_ms = -1
        self.updated_ms = -1
        # Ordered, so that markers come in the order in which partitions joined.
        self.partitions: dict[PartitionKey, None] = {}
        self.groups: dict[str, None] = {}

    @property
    def is_open(self) -> bool:
        return self.state is _ONGOING

    @property
    def is_kept(self) -> bool:
        """Open, but taken over by a new identity that may only end it."""
        return self.is_open and (self.open_epoch != self.epoch or self.open_producer_id != self.producer_id)

    @property
    def writer(self) -> tuple[int, int]:
        """The producer id and epoch to know it by in its partitions: of the open transaction, or the next."""
        if self.is_open:
            return self.open_producer_id, self.open_epoch
        return self.producer_id, self.epoch

    def part(self) -> TransactionPart:
        """As a snapshot has it."""
        return TransactionPart(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            last_producer_id=self.last_producer_id,
            last_epoch=self.last_epoch,
            timeout_ms=self.timeout_ms,
            two_phase=self.two_phase,
            principal=self.principal,
            state=self.state,
            ended_by_broker=self.ended_by_broker,
            open_producer_id=self.open_producer_id,
            open_epoch=self.open_epoch,
            started_ms=self.started_ms,
            updated_ms=self.updated_ms,
            partitions=[
                JoinedPartition(topic_id=topic_id, index=index) for topic_id, index in self.partitions
            ],
            groups=list(self.groups),
        )

    @classmethod
    def of(cls, part: TransactionPart) -> Transaction:
        transaction = cls(part.transactional_id)
        transaction.producer_id = part.producer_id
        transaction.epoch = part.producer_epoch
        transaction.last_producer_id = part.last_producer_id
        transaction.last_epoch = part.last_epoch
        transaction.timeout_ms = part.timeout_ms
        transaction.two_phase = part.two_phase
        transaction.principal = part.principal
        transaction.state = State(part.state)
        transaction.ended_by_broker = part.ended_by_broker
        transaction.open_producer_id = part.open_producer_id
        transaction.open_epoch = part.open_epoch
        transaction.started_ms = part.started_ms
        transaction.updated_ms = part.updated_ms
        transaction.partitions = {(joined.topic_id, joined.index): None for joined in part.partitions}
        transaction.groups = dict.fromkeys(part.groups)
        return transaction

    def move_to(self, state: State) -> None:
        assert self.state in ALLOWED_FROM[state], (
            f"{self.transactional_id}: {self.state.name} to {state.name}"
        )
        self.state = state

    def identify(self, entry: TransactionIdentified) -> None:
        self.producer_id = entry.producer_id
        self.epoch = entry.producer_epoch
        self.last_producer_id = entry.last_producer_id
        self.last_epoch = entry.last_epoch
        self.timeout_ms = entry.timeout_ms
        self.two_phase = entry.two_phase
        self.principal = entry.principal
        self.updated_ms = entry.updated_ms
        if not entry.keeps_open:
            self.move_to(State.EMPTY)
            self.ended_by_broker = False

    def join(self, entry: TransactionJoined) -> None:
        if not self.is_open:
            self.open_producer_id = self.producer_id
            self.open_epoch = self.epoch
            self.started_ms = entry.started_ms
        self.move_to(State.ONGOING)
        self.updated_ms = entry.started_ms
        for joined in entry.partitions:
            self.partitions[(joined.topic_id, joined.index)] = None
        for group in entry.groups:
            self.groups[group] = None

    def end(self, entry: TransactionEnded) -> None:
        if entry.committed:
            self.move_to(State.PREPARE_COMMIT)
            self.move_to(State.COMPLETE_COMMIT)
        else:
            if entry.by_broker:
                self.move_to(State.PREPARE_EPOCH_FENCE)
            self.move_to(State.PREPARE_ABORT)
            self.move_to(State.COMPLETE_ABORT)
        self.ended_by_broker = entry.by_broker
        self.producer_id = entry.producer_id
        self.epoch = entry.producer_epoch
        self.last_producer_id = entry.last_producer_id
        self.last_epoch = entry.last_epoch
        self.updated_ms = entry.updated_ms
        self.open_producer_id = NO_PRODUCER_ID
        self.open_epoch = NO_EPOCH
        self.started_ms = -1
        self.partitions = {}
        self.groups = {}


class Transactions:
    """All transactional ids, and which of them owns a producer id."""

    __slots__ = ("by_id", "by_producer_id", "open_by_principal")

    def __init__(self) -> None:
        self.by_id: dict[str, Transaction] = {}
        self.by_producer_id: dict[int, Transaction] = {}
        self.open_by_principal: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def load(self, part: TransactionPart) -> None:
        transaction = Transaction.of(part)
        self.by_id[transaction.transactional_id] = transaction
        self._own(transaction)
        if transaction.is_open:
            self._count(transaction, 1)

    def identify(self, entry: TransactionIdentified) -> None:
        transaction = self.by_id.get(entry.transactional_id)
        if transaction is None:
            if entry.keeps_open:
                return  # A replay that begins in the middle of a life that was over before the snapshot.
            transaction = self.by_id[entry.transactional_id] = Transaction(entry.transactional_id)
        self._disown(transaction)
        if transaction.is_open:
            self._count(transaction, -1)
        transaction.identify(entry)
        if transaction.is_open:
            self._count(transaction, 1)
        self._own(transaction)

    def join(self, entry: TransactionJoined) -> None:
        transaction = self.by_id.get(entry.transactional_id)
        if transaction is None:
            return  # A replay that begins after it was made and before it was forgotten.
        if not transaction.is_open:
            self._count(transaction, 1)
        transaction.join(entry)

    def end(self, entry: TransactionEnded) -> None:
        transaction = self.by_id.get(entry.transactional_id)
        if transaction is None:
            return
        if transaction.is_open:
            self._count(transaction, -1)
        self._disown(transaction)
        transaction.end(entry)
        self._own(transaction)

    def forget(self, entry: TransactionForgotten) -> None:
        transaction = self.by_id.pop(entry.transactional_id, None)
        if transaction is not None:
            transaction.move_to(State.DEAD)
            self._disown(transaction)

    @property
    def open_count(self) -> int:
        return sum(self.open_by_principal.values())

    def _count(self, transaction: Transaction, change: int) -> None:
        principal = transaction.principal
        self.open_by_principal[principal] = self.open_by_principal.get(principal, 0) + change

    def _own(self, transaction: Transaction) -> None:
        self.by_producer_id[transaction.producer_id] = transaction
        if transaction.is_open:
            self.by_producer_id[transaction.open_producer_id] = transaction

    def _disown(self, transaction: Transaction) -> None:
        self.by_producer_id.pop(transaction.producer_id, None)
        self.by_producer_id.pop(transaction.open_producer_id, None)
