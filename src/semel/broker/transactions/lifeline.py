"""Transactions that end with the connection over which they were begun, where its client asked for that.

A lifeline knows which transactional ids joined something by its connection, and under which identity. When
the connection is gone, those that are still open under that identity are aborted, and their epoch is raised:
a client that lives on finds that its transaction was aborted, and one that took the id over is not touched.
Prepared transactions (KIP-939) wait for their decision, whatever becomes of connections.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from semel.broker.core import Broker
from semel.broker.decision import Decision, Now
from semel.broker.entries import Entry
from semel.broker.transaction_messages import TransactionJoined
from semel.broker.transactions.ending import end_entries, raised

log = logging.getLogger(__name__)


class Lifeline:
    """What one connection holds. Not state: no connection outlives the process that has it."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}

    def hold(self, broker: Broker, entries: Iterable[Entry]) -> None:
        """A request that came by the connection was decided: what joined a transaction by it is held."""
        for entry in entries:
            if isinstance(entry, TransactionJoined):
                transaction = broker.transactions.by_id[entry.transactional_id]
                self._held[entry.transactional_id] = (transaction.producer_id, transaction.epoch)

    def abort_held(self, broker: Broker, now: Now) -> Iterator[Decision]:
        """The connection is gone. Each decision must be applied before the next is asked for."""
        for transactional_id, identity in self._held.items():
            transaction = broker.transactions.by_id.get(transactional_id)
            if transaction is None or not transaction.is_open or transaction.two_phase:
                continue
            if (transaction.producer_id, transaction.epoch) != identity:
                continue
            log.info("aborting the transaction of %r: its connection is gone", transactional_id)
            broker.transaction_deadlines.cancel(transactional_id)
            successor = raised(broker, transaction)
            entries = end_entries(
                broker, transaction, commit=False, successor=successor, by_broker=True, now_ms=now.wall_ms
            )
            yield Decision(None, entries, sync=successor.must_sync)
