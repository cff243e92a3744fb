"""How partitions and groups join a transaction, and how its identity is checked on the way.

AddPartitionsToTxn (24) and AddOffsetsToTxn (25) say it beforehand; since version 2 (KIP-890) Produce and
TxnOffsetCommit say it by the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.refusal import Refused
from semel.broker.topics import Partition
from semel.broker.transaction_messages import JoinedPartition, TransactionJoined
from semel.broker.transactions.errors import abortable, ask_again, fenced
from semel.broker.transactions.state import Transaction
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
)

_BATCHED_SINCE: Final = 4
_MAX_PARTITIONS: Final = "transaction.max.partitions"
_MAX_OPEN: Final = "max.open.transactions"


def find(
    broker: Broker, transactional_id: str | None, producer_id: int, epoch: int, api: ApiKey, version: int
) -> Transaction | ErrorCode:
    """The transactional id if the producer has its identity, or why not."""
    transaction = broker.transactions.by_id.get(transactional_id or "")
    if transaction is None or transaction.producer_id != producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if transaction.epoch != epoch:
        return fenced(broker.counters, api, version)
    if transaction.is_kept:
        return abortable(api, version)  # A prepared transaction may only be ended.
    return transaction


def join(
    broker: Broker,
    transaction: Transaction,
    now: Now,
    *,
    partitions: Sequence[Partition] = (),
    group: str | None = None,
    joining: int = 0,
) -> TransactionJoined | Refused | None:
    """The entry by which these join the transaction; None if they are in it; a refusal if it may not grow.

    `joining` is how many join by the same request before these. Groups count like partitions.
    """
    joined = [
        JoinedPartition(topic_id=partition.topic.topic_id, index=partition.index)
        for partition in partitions
        if (partition.topic.topic_id, partition.index) not in transaction.partitions
    ]
    groups = [] if group is None or group in transaction.groups else [group]
    if transaction.is_open and not joined and not groups:
        return None
    limits = broker.limits
    size = len(transaction.partitions) + len(transaction.groups) + joining + len(joined) + len(groups)
    if size > limits.max_transaction_partitions:
        reason = (
            f"the transaction of {transaction.transactional_id!r} ({transaction.principal}) would have "
            f"{size} partitions and groups, and {_MAX_PARTITIONS} is {limits.max_transaction_partitions}"
        )
        return _at_limit(broker, _MAX_PARTITIONS, reason, now)
    if not transaction.is_open:
        open_count = broker.transactions.open_by_principal.get(transaction.principal, 0)
        if open_count >= limits.max_open_transactions:
            reason = (
                f"{transaction.transactional_id!r} cannot begin a transaction: {transaction.principal} has "
                f"{open_count} open, and {_MAX_OPEN} is {limits.max_open_transactions}"
            )
            return _at_limit(broker, _MAX_OPEN, reason, now)
        if not transaction.two_phase:
            # The clock of a transaction runs from its first partition.
            deadline_ms = now.monotonic_ms + transaction.timeout_ms
            broker.transaction_deadlines.set(transaction.transactional_id, deadline_ms)
    return TransactionJoined(
        transactional_id=transaction.transactional_id,
        partitions=joined,
        groups=groups,
        started_ms=now.wall_ms,
    )


def _begins_unheard(broker: Broker, transaction: Transaction, caller: Caller) -> bool:
    """Whether a transaction would begin by what its producer may have given up long since."""
    is_heard = broker.hearing.coordination.hear(transaction.transactional_id, caller.connection)
    return not is_heard and not transaction.is_open


def _at_limit(broker: Broker, setting: str, reason: str, now: Now) -> Refused:
    # Most answers have no room for a reason, so the log has it, too.
    broker.limit_warnings.refused(setting, reason, now)
    return Refused(ErrorCode.POLICY_VIOLATION, reason)


def add_offsets_to_txn(broker: Broker, request: AddOffsetsToTxnRequest, caller: Caller, now: Now) -> Decision:
    found = find(
        broker,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        ApiKey.ADD_OFFSETS_TO_TXN,
        caller.api_version,
    )
    if isinstance(found, ErrorCode):
        return Decision(AddOffsetsToTxnResponse(error_code=found))
    if not request.group_id:
        return Decision(AddOffsetsToTxnResponse(error_code=ErrorCode.INVALID_GROUP_ID))
    if _begins_unheard(broker, found, caller):
        refused = ask_again(broker.counters, ApiKey.ADD_OFFSETS_TO_TXN)
        return Decision(AddOffsetsToTxnResponse(error_code=refused))
    entry = join(broker, found, now, group=request.group_id)
    if isinstance(entry, Refused):
        return Decision(AddOffsetsToTxnResponse(error_code=entry.code))
    return Decision(AddOffsetsToTxnResponse(), [] if entry is None else [entry])


def add_partitions_to_txn(
    broker: Broker, request: AddPartitionsToTxnRequest, caller: Caller, now: Now
) -> Decision:
    if caller.api_version < _BATCHED_SINCE:
        wanted = AddPartitionsToTxnTransaction(
            transactional_id=request.v3_and_below_transactional_id,
            producer_id=request.v3_and_below_producer_id,
            producer_epoch=request.v3_and_below_producer_epoch,
            verify_only=False,
            topics=request.v3_and_below_topics,
        )
        results, entries = _add(broker, wanted, caller, now)
        return Decision(AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results), entries)
    by_transaction: list[AddPartitionsToTxnResult] = []
    all_entries: dict[str, list[Entry]] = {}
    for wanted in request.transactions:
        if wanted.transactional_id in all_entries:
            results = _every(wanted.topics, ErrorCode.INVALID_REQUEST)
        else:
            results, all_entries[wanted.transactional_id] = _add(broker, wanted, caller, now)
        by_transaction.append(
            AddPartitionsToTxnResult(transactional_id=wanted.transactional_id, topic_results=results)
        )
    entries = [entry for entries in all_entries.values() for entry in entries]
    return Decision(AddPartitionsToTxnResponse(results_by_transaction=by_transaction), entries)


def _add(
    broker: Broker, wanted: AddPartitionsToTxnTransaction, caller: Caller, now: Now
) -> tuple[list[AddPartitionsToTxnTopicResult], list[Entry]]:
    """All of the partitions join, or none."""
    found = find(
        broker,
        wanted.transactional_id,
        wanted.producer_id,
        wanted.producer_epoch,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        caller.api_version,
    )
    if isinstance(found, ErrorCode):
        return _every(wanted.topics, found), []
    if wanted.verify_only:
        return _verified(broker, found, wanted.topics, caller.api_version), []
    partitions = [
        broker.catalog.partition(topic.name, index) for topic in wanted.topics for index in topic.partitions
    ]
    known = [partition for partition in partitions if partition is not None]
    if len(known) < len(partitions):
        return _unknown(broker, wanted.topics), []
    if caller.api_version < _BATCHED_SINCE and _begins_unheard(broker, found, caller):
        return _every(wanted.topics, ask_again(broker.counters, ApiKey.ADD_PARTITIONS_TO_TXN)), []
    entry = join(broker, found, now, partitions=known)
    if isinstance(entry, Refused):
        return _every(wanted.topics, entry.code), []
    return _every(wanted.topics, ErrorCode.NONE), [] if entry is None else [entry]


def _verified(
    broker: Broker, transaction: Transaction, topics: list[AddPartitionsToTxnTopic], version: int
) -> list[AddPartitionsToTxnTopicResult]:
    """Which of the partitions are in the open transaction."""

    def code(name: str, index: int) -> ErrorCode:
        topic = broker.catalog.by_name.get(name)
        if topic is not None and transaction.is_open and (topic.topic_id, index) in transaction.partitions:
            return ErrorCode.NONE
        return abortable(ApiKey.ADD_PARTITIONS_TO_TXN, version)

    return [_result(topic, [code(topic.name, index) for index in topic.partitions]) for topic in topics]


def _unknown(broker: Broker, topics: list[AddPartitionsToTxnTopic]) -> list[AddPartitionsToTxnTopicResult]:
    """Some partitions do not exist: say so of them, and of the others that nothing was done."""

    def code(name: str, index: int) -> ErrorCode:
        if broker.catalog.partition(name, index) is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.OPERATION_NOT_ATTEMPTED

    return [_result(topic, [code(topic.name, index) for index in topic.partitions]) for topic in topics]


def _every(topics: list[AddPartitionsToTxnTopic], code: int) -> list[AddPartitionsToTxnTopicResult]:
    return [_result(topic, [code] * len(topic.partitions)) for topic in topics]


def _result(topic: AddPartitionsToTxnTopic, codes: Sequence[int]) -> AddPartitionsToTxnTopicResult:
    return AddPartitionsToTxnTopicResult(
        name=topic.name,
        results_by_partition=[
            AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)
            for index, code in zip(topic.partitions, codes, strict=True)
        ],
    )
