"""What a Produce must satisfy on behalf of transactions, for each of its batches.

A transactional batch must come from the identity of its transactional id, and its partition must be in the
open transaction. Clients of version 2 (Produce v12 and later) let it join by the batch itself; for older
ones a batch outside of its transaction is refused, so that no late one can open a transaction that nobody
ends.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Now
from semel.broker.refusal import Refused
from semel.broker.topics import Partition
from semel.broker.transaction_messages import TransactionJoined
from semel.broker.transactions.errors import abortable, fenced
from semel.broker.transactions.joining import find, join
from semel.broker.transactions.state import Transaction
from semel.wire.apis import ApiKey
from semel.wire.batch import BatchHeader
from semel.wire.errors import ErrorCode

JOINS_SINCE: Final = 12


class Writer:
    """The producer of one Produce request."""

    __slots__ = ("_broker", "_joining", "_transactional_id", "_version", "now")

    def __init__(self, broker: Broker, transactional_id: str | None, version: int, now: Now) -> None:
        self._broker = broker
        self._transactional_id = transactional_id
        self._version = version
        self._joining = 0
        """Partitions that join by this request."""
        self.now = now

    def check(self, partition: Partition, header: BatchHeader) -> Transaction | None:
        """Refuse a batch whose producer has another epoch now, or that is outside of its transaction.

        Before all else: not even a batch that the partition has already may be late. Returns the transaction
        of a transactional batch.
        """
        if header.is_transactional:
            transaction = self._transaction(header)
            if self._version < JOINS_SINCE and not _holds(transaction, partition):
                raise Refused(
                    abortable(ApiKey.PRODUCE, self._version),
                    f"{partition.topic.name}-{partition.index} is not in an open transaction of "
                    f"{self._transactional_id!r}; add it first, or abort and begin again",
                )
            return transaction
        owner = self._broker.transactions.by_producer_id.get(header.producer_id)
        if owner is not None and header.producer_epoch != owner.epoch:
            raise Refused(
                fenced(self._broker.counters, ApiKey.PRODUCE, self._version),
                f"producer {header.producer_id} has epoch {owner.epoch}, not {header.producer_epoch}",
            )
        return None

    def join(
        self, partition: Partition, header: BatchHeader, transaction: Transaction | None
    ) -> TransactionJoined | None:
        """The entry by which the batch's partition joins its transaction, as `check` found it.

        None if there is no need.
        """
        if transaction is None:
            if header.producer_id in partition.log.open_transactions:
                raise Refused(
                    ErrorCode.INVALID_TXN_STATE,
                    f"producer {header.producer_id} has a transaction open here; the batch is in none",
                )
            return None
        if _holds(transaction, partition):
            return None
        entry = join(self._broker, transaction, self.now, partitions=(partition,), joining=self._joining)
        if isinstance(entry, Refused):
            raise entry
        self._joining += 1
        return entry

    def _transaction(self, header: BatchHeader) -> Transaction:
        if self._transactional_id is None:
            raise Refused(
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                "a transactional batch needs a request that names its transactional id",
            )
        found = find(
            self._broker,
            self._transactional_id,
            header.producer_id,
            header.producer_epoch,
            ApiKey.PRODUCE,
            self._version,
        )
        if isinstance(found, ErrorCode):
            raise Refused(found, f"{self._transactional_id!r} has another producer now: {found.name}")
        return found


def _holds(transaction: Transaction, partition: Partition) -> bool:
    return transaction.is_open and (partition.topic.topic_id, partition.index) in transaction.partitions
