"""DescribeProducers (61), DescribeTransactions (65), ListTransactions (66): who writes, and what is open."""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.topic_pattern import InvalidPattern
from semel.broker.groups.topic_pattern import TopicPattern as Pattern
from semel.broker.topics import Partition
from semel.broker.transactions.state import State, Transaction
from semel.wire.errors import ErrorCode
from semel.wire.messages import describe_producers as producers
from semel.wire.messages import describe_transactions as described
from semel.wire.messages import list_transactions as listed

NO_TIMEOUT_MS: Final = 2**31 - 1
"""What tells a transaction that may stay prepared (KIP-939): its timeout is the largest there is."""
_STATES: Final = {state.label: state for state in State}


def describe_producers(
    broker: Broker, request: producers.DescribeProducersRequest, caller: Caller, now: Now
) -> Decision:
    topics = [
        producers.TopicResponse(
            name=topic.name,
            partitions=[
                _producers_of(broker.catalog.partition(topic.name, index), index)
                for index in topic.partition_indexes
            ],
        )
        for topic in request.topics
    ]
    return Decision(producers.DescribeProducersResponse(topics=topics))


def _producers_of(partition: Partition | None, index: int) -> producers.PartitionResponse:
    if partition is None:
        return producers.PartitionResponse(
            partition_index=index,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message="there is no such partition",
        )
    log = partition.log
    return producers.PartitionResponse(
        partition_index=index,
        active_producers=[
            producers.ProducerState(
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                last_sequence=producer.last_sequence,
                last_timestamp=producer.last_timestamp_ms,
                coordinator_epoch=producer.coordinator_epoch,
                current_txn_start_offset=log.open_transactions.get(producer.producer_id, -1),
            )
            for producer in log.producers.values()
        ],
    )


def describe_transactions(
    broker: Broker, request: described.DescribeTransactionsRequest, caller: Caller, now: Now
) -> Decision:
    states = [_described(broker, transactional_id) for transactional_id in request.transactional_ids]
    return Decision(described.DescribeTransactionsResponse(transaction_states=states))


def _described(broker: Broker, transactional_id: str) -> described.TransactionState:
    transaction = broker.transactions.by_id.get(transactional_id)
    if transaction is None:
        return described.TransactionState(
            error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id=transactional_id
        )
    partitions: dict[str, list[int]] = {}
    for topic_id, index in transaction.partitions:
        topic = broker.catalog.by_id.get(topic_id)
        if topic is not None:
            partitions.setdefault(topic.name, []).append(index)
    writer_id, writer_epoch = transaction.writer
    return described.TransactionState(
        transactional_id=transactional_id,
        transaction_state=transaction.state.label,
        transaction_timeout_ms=NO_TIMEOUT_MS if transaction.two_phase else transaction.timeout_ms,
        transaction_start_time_ms=transaction.started_ms,
        producer_id=writer_id,
        producer_epoch=writer_epoch,
        topics=[
            described.TopicData(topic=name, partitions=sorted(indexes))
            for name, indexes in sorted(partitions.items())
        ],
    )


def list_transactions(
    broker: Broker, request: listed.ListTransactionsRequest, caller: Caller, now: Now
) -> Decision:
    try:
        # Not Python's own engine: a short pattern from the network can keep that busy for ever.
        pattern = Pattern(request.transactional_id_pattern) if request.transactional_id_pattern else None
    except InvalidPattern:
        return Decision(listed.ListTransactionsResponse(error_code=ErrorCode.INVALID_REGULAR_EXPRESSION))
    states = {_STATES[name] for name in request.state_filters if name in _STATES}
    unknown = [name for name in request.state_filters if name not in _STATES]

    def is_wanted(transaction: Transaction) -> bool:
        if request.state_filters and transaction.state not in states:
            return False
        if request.producer_id_filters and transaction.writer[0] not in request.producer_id_filters:
            return False
        is_young = not transaction.is_open or now.wall_ms - transaction.started_ms < request.duration_filter
        if request.duration_filter >= 0 and is_young:
            return False
        return pattern is None or pattern.matches(transaction.transactional_id)

    return Decision(
        listed.ListTransactionsResponse(
            unknown_state_filters=unknown,
            transaction_states=[
                listed.TransactionState(
                    transactional_id=transaction.transactional_id,
                    producer_id=transaction.writer[0],
                    transaction_state=transaction.state.label,
                )
                for transaction in broker.transactions.by_id.values()
                if is_wanted(transaction)
            ],
        )
    )
