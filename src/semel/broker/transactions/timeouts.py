"""What time does to transactions: those open too long are aborted, ids idle too long are forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Decision, Now
from semel.broker.entries import Entry
from semel.broker.transaction_messages import TransactionForgotten
from semel.broker.transactions.ending import end_entries, raised

log = logging.getLogger(__name__)

ABORTS_PER_TICK: Final = 200
"""Of transactions that are open too long: what else came due waits for the next tick, not the event loop."""


def start_clocks(broker: Broker, now: Now) -> None:
    """After a restart: the rest of each open transaction's time runs, never more than the whole of it."""
    for transaction in broker.transactions.by_id.values():
        if transaction.is_open and not transaction.two_phase:
            elapsed_ms = now.wall_ms - transaction.started_ms
            rest_ms = min(max(transaction.timeout_ms - elapsed_ms, 0), transaction.timeout_ms)
            broker.transaction_deadlines.set(transaction.transactional_id, now.monotonic_ms + rest_ms)


def abort_expired(broker: Broker, now: Now) -> Iterator[Decision]:
    """Each decision must be applied before the next is asked for: they may write to the same partitions."""
    for transactional_id in broker.transaction_deadlines.due(now.monotonic_ms, ABORTS_PER_TICK):
        transaction = broker.transactions.by_id.get(transactional_id)
        if transaction is None or not transaction.is_open or transaction.two_phase:
            continue
        log.warning(
            "aborting the transaction of %r: open for over its timeout of %d ms, %d partitions, producer %d",
            transactional_id,
            transaction.timeout_ms,
            len(transaction.partitions),
            transaction.producer_id,
        )
        broker.counters.timed_out += 1
        successor = raised(broker, transaction)
        entries = end_entries(
            broker,
            transaction,
            commit=False,
            successor=successor,
            by_broker=True,
            now_ms=now.wall_ms,
        )
        yield Decision(None, entries, sync=successor.must_sync)


def forget_idle(broker: Broker, transactional_ids: Iterable[str], now: Now) -> Decision:
    """Forget those of the given ids that are idle: a client that comes back gets a new producer id."""
    limit_ms = now.wall_ms - broker.limits.transactional_id_expiration_ms
    entries: list[Entry] = []
    for transactional_id in transactional_ids:
        transaction = broker.transactions.by_id.get(transactional_id)
        if transaction is not None and not transaction.is_open and transaction.updated_ms < limit_ms:
            entries.append(TransactionForgotten(transactional_id=transactional_id))
            broker.hearing.forget(transactional_id)
    return Decision(None, entries)
