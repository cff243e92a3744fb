"""InitProducerId (22): an identity for a producer; with a transactional id it fences whoever had it before.

Without a transactional id every call gives a fresh producer id at epoch 0. With one, what is open is
aborted in the same journal group, unless it is a prepared transaction that shall be kept (KIP-939).
"""

from __future__ import annotations

import logging
from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.transaction_messages import TransactionIdentified
from semel.broker.transactions.ending import Identity, end_entries, fresh, raised
from semel.broker.transactions.errors import fenced
from semel.broker.transactions.state import MAX_EPOCH, NO_EPOCH, NO_PRODUCER_ID, State, Transaction
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

log = logging.getLogger(__name__)

_MAX_IDS: Final = "max.transactional.ids"


def init_producer_id(broker: Broker, request: InitProducerIdRequest, caller: Caller, now: Now) -> Decision:
    if request.transactional_id is None:
        identity = fresh(broker)
        return _decided(broker, identity, [])
    error = _refuses(broker, request)
    if error is not None:
        return _refused(error)
    transaction = broker.transactions.by_id.get(request.transactional_id)
    if transaction is None:
        if _is_full(broker, request.transactional_id, now):
            return _refused(ErrorCode.POLICY_VIOLATION)
        return _first(broker, request, caller, now)
    return _again(broker, request, caller, now, transaction)


def _refuses(broker: Broker, request: InitProducerIdRequest) -> ErrorCode | None:
    if request.transactional_id == "":
        return ErrorCode.INVALID_REQUEST
    if (request.producer_id == NO_PRODUCER_ID) != (request.producer_epoch == NO_EPOCH):
        return ErrorCode.INVALID_REQUEST  # Half an identity is none.
    if request.enable_2pc and not broker.limits.two_phase_commit:
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if request.keep_prepared_txn and not request.enable_2pc:
        return ErrorCode.INVALID_REQUEST
    in_bounds = 0 < request.transaction_timeout_ms <= broker.limits.max_transaction_timeout_ms
    if not in_bounds and not request.enable_2pc:
        return ErrorCode.INVALID_TRANSACTION_TIMEOUT
    return None


def _is_full(broker: Broker, transactional_id: str, now: Now) -> bool:
    """Whether there are as many ids as there may be. The answer has no room for a reason, the log has."""
    known, limit = len(broker.transactions), broker.limits.max_transactional_ids
    if known < limit:
        return False
    reason = (
        f"there are {known} transactional ids, so {transactional_id!r} cannot be one; use the same id again "
        f"after a restart, lower transactional.id.expiration.ms, or raise {_MAX_IDS}"
    )
    broker.limit_warnings.refused(_MAX_IDS, reason, now)
    return True


def _first(broker: Broker, request: InitProducerIdRequest, caller: Caller, now: Now) -> Decision:
    """An id that is not known, or not any more: an identity given earlier is of no use then."""
    identity = fresh(broker)
    entry = _identified(request, caller, now, identity, NO_PRODUCER_ID, NO_EPOCH)
    return _decided(broker, identity, [entry])


def _again(
    broker: Broker, request: InitProducerIdRequest, caller: Caller, now: Now, transaction: Transaction
) -> Decision:
    is_named = request.producer_id != NO_PRODUCER_ID
    if is_named and _asks_again(request, transaction):
        return Decision(
            InitProducerIdResponse(producer_id=transaction.producer_id, producer_epoch=transaction.epoch)
        )
    if is_named and not _may_continue(request, transaction):
        return _refused(fenced(broker.counters, ApiKey.INIT_PRODUCER_ID, caller.api_version))
    identity = raised(broker, transaction)
    broker.hearing.forget(transaction.transactional_id)
    # Whoever names its identity may have lost the answer and ask again; whoever is fenced must not come back.
    last = (transaction.producer_id, transaction.epoch) if is_named else (NO_PRODUCER_ID, NO_EPOCH)
    entry = _identified(request, caller, now, identity, *last)
    if not transaction.is_open:
        return _decided(broker, identity, [entry])
    if request.keep_prepared_txn and transaction.two_phase:
        entry.keeps_open = True
        return _decided(broker, identity, [entry], transaction)
    log.info(
        "aborting the transaction of %r: its id was initialized again, %d partitions, producer %d epoch %d",
        transaction.transactional_id,
        len(transaction.partitions),
        transaction.open_producer_id,
        transaction.open_epoch,
    )
    entries = end_entries(
        broker, transaction, commit=False, successor=identity, by_broker=True, now_ms=now.wall_ms
    )
    return _decided(broker, Identity(identity.producer_id, identity.epoch), [*entries, entry])


def _asks_again(request: InitProducerIdRequest, transaction: Transaction) -> bool:
    """The same request as the last one, whose answer was lost: nothing has happened under its result yet."""
    return (
        transaction.state is State.EMPTY
        and transaction.last_epoch != NO_EPOCH
        and (request.producer_id, request.producer_epoch)
        == (transaction.last_producer_id, transaction.last_epoch)
    )


def _may_continue(request: InitProducerIdRequest, transaction: Transaction) -> bool:
    """Whether the producer that names its identity still has it, or lost it to a timeout alone (KIP-360)."""
    named = (request.producer_id, request.producer_epoch)
    if named == (transaction.producer_id, transaction.epoch):
        return True
    before = (transaction.last_producer_id, transaction.last_epoch)
    return named == before and not transaction.is_open and transaction.last_epoch != NO_EPOCH


def _identified(
    request: InitProducerIdRequest,
    caller: Caller,
    now: Now,
    identity: Identity,
    last_producer_id: int,
    last_epoch: int,
) -> TransactionIdentified:
    assert request.transactional_id is not None
    assert identity.epoch <= MAX_EPOCH
    return TransactionIdentified(
        transactional_id=request.transactional_id,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        last_producer_id=last_producer_id,
        last_epoch=last_epoch,
        timeout_ms=request.transaction_timeout_ms,
        two_phase=request.enable_2pc,
        principal=caller.principal,
        updated_ms=now.wall_ms,
    )


def _decided(
    broker: Broker, identity: Identity, entries: list[Entry], kept: Transaction | None = None
) -> Decision:
    reply = InitProducerIdResponse(producer_id=identity.producer_id, producer_epoch=identity.epoch)
    if kept is not None:
        reply.ongoing_txn_producer_id = kept.open_producer_id
        reply.ongoing_txn_producer_epoch = kept.open_epoch
    if identity.reserved is not None:
        entries = [identity.reserved, *entries]
    # An identity is never given twice, whatever the durability: it is on disk before it is told.
    return Decision(reply, entries, sync=bool(entries))


def _refused(error: ErrorCode) -> Decision:
    return Decision(InitProducerIdResponse(error_code=error, producer_epoch=NO_EPOCH))
