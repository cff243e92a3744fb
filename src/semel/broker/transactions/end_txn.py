"""EndTxn (26): commit or abort, in one journal group.

Version 5 raises the epoch (KIP-890), so a retry can be told from the end of the next transaction: it has
the epoch before. Below that a retry is whatever asks for the outcome that is there already, and what arrives
after its sender gave it up is told by its connection (`hearing.py`).
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.transactions.ending import end_entries, raised
from semel.broker.transactions.errors import abortable, ask_again, fenced
from semel.broker.transactions.state import State, Transaction
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse

RAISES_EPOCH_SINCE: Final = 5
_OUTCOME: Final = {True: State.COMPLETE_COMMIT, False: State.COMPLETE_ABORT}


def end_txn(broker: Broker, request: EndTxnRequest, caller: Caller, now: Now) -> Decision:
    transaction = broker.transactions.by_id.get(request.transactional_id)
    if transaction is None:
        return _refused(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    raises_epoch = caller.api_version >= RAISES_EPOCH_SINCE
    named = (request.producer_id, request.producer_epoch)
    if named != (transaction.producer_id, transaction.epoch):
        return _by_another_identity(broker, transaction, request, caller, raises_epoch)
    if transaction.is_open:
        hearing = broker.hearing.coordination
        if not raises_epoch and not hearing.hear(transaction.transactional_id, caller.connection):
            return _refused(ask_again(broker.counters, ApiKey.END_TXN))
        successor = raised(broker, transaction) if raises_epoch else None
    elif raises_epoch and not request.committed:
        successor = raised(
            broker, transaction
        )  # Nothing was added; the client expects a raised epoch all the same.
    elif not raises_epoch and transaction.state is _OUTCOME[request.committed]:
        return Decision(EndTxnResponse())
    else:
        return _refused(ErrorCode.INVALID_TXN_STATE)
    entries = end_entries(
        broker,
        transaction,
        commit=request.committed,
        successor=successor,
        by_broker=False,
        now_ms=now.wall_ms,
    )
    reply = EndTxnResponse()
    if successor is not None:
        reply.producer_id, reply.producer_epoch = successor.producer_id, successor.epoch
    broker.transaction_deadlines.cancel(transaction.transactional_id)
    broker.hearing.ended(transaction.transactional_id)
    return Decision(reply, entries, sync=successor is not None and successor.must_sync)


def _by_another_identity(
    broker: Broker, transaction: Transaction, request: EndTxnRequest, caller: Caller, raises_epoch: bool
) -> Decision:
    """A retry of the request that raised the epoch, somebody whose time ran out, or somebody fenced."""
    named = (request.producer_id, request.producer_epoch)
    is_last = named == (transaction.last_producer_id, transaction.last_epoch)
    if is_last and raises_epoch and transaction.state in _OUTCOME.values():
        if transaction.state is _OUTCOME[request.committed]:
            return Decision(
                EndTxnResponse(producer_id=transaction.producer_id, producer_epoch=transaction.epoch)
            )
        if transaction.ended_by_broker:
            return _refused(abortable(ApiKey.END_TXN, caller.api_version))
        return _refused(ErrorCode.INVALID_TXN_STATE)
    if request.producer_id not in (transaction.producer_id, transaction.last_producer_id):
        return _refused(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    return _refused(fenced(broker.counters, ApiKey.END_TXN, caller.api_version))


def _refused(error: ErrorCode) -> Decision:
    return Decision(EndTxnResponse(error_code=error))
