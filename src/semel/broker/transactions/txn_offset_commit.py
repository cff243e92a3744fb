"""TxnOffsetCommit (28): a group's offsets, stored when the transaction commits and dropped when it aborts.

Two checks must pass: the producer has the identity of its transactional id, and the consumer is still a
member of its group (KIP-447). Since version 5 (KIP-890) the group joins the transaction by this; before, it
must have been added.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.group_messages import PartitionOffset, TopicOffsets, TxnOffsetsPending
from semel.broker.groups.offset_commit import refuses_offset
from semel.broker.refusal import Refused
from semel.broker.transactions.errors import abortable, ask_again
from semel.broker.transactions.joining import find, join
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

_JOINS_SINCE: Final = 5


def txn_offset_commit(broker: Broker, request: TxnOffsetCommitRequest, caller: Caller, now: Now) -> Decision:
    joined = _admit(broker, request, caller, now)
    if isinstance(joined, ErrorCode):
        return Decision(
            TxnOffsetCommitResponse(topics=[_answer(broker, topic, [], joined) for topic in request.topics])
        )
    accepted: list[TopicOffsets] = []
    topics = [_answer(broker, topic, accepted, None) for topic in request.topics]
    if not accepted:
        return Decision(TxnOffsetCommitResponse(topics=topics))
    pending = TxnOffsetsPending(
        group_id=request.group_id,
        producer_id=request.producer_id,
        producer_epoch=request.producer_epoch,
        committed_at_ms=now.wall_ms,
        topics=accepted,
    )
    return Decision(TxnOffsetCommitResponse(topics=topics), [*joined, pending])


def _admit(
    broker: Broker, request: TxnOffsetCommitRequest, caller: Caller, now: Now
) -> list[Entry] | ErrorCode:
    """What must be journaled before the offsets, or why they are refused."""
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    found = find(
        broker,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        ApiKey.TXN_OFFSET_COMMIT,
        caller.api_version,
    )
    if isinstance(found, ErrorCode):
        return found
    refused = broker.groups.refuses_txn_commit(
        request.group_id, request.member_id, request.generation_id, request.group_instance_id
    )
    if refused is not None:
        return refused
    joins = caller.api_version >= _JOINS_SINCE
    if found.is_open and request.group_id in found.groups:
        if not joins and not broker.hearing.offsets.hear(found.transactional_id, caller.connection):
            return ask_again(broker.counters, ApiKey.TXN_OFFSET_COMMIT)
        return []
    if not joins:
        return abortable(ApiKey.TXN_OFFSET_COMMIT, caller.api_version)
    entry = join(broker, found, now, group=request.group_id)
    if isinstance(entry, Refused):
        return ErrorCode(entry.code)
    return [] if entry is None else [entry]


def _answer(
    broker: Broker,
    wanted: TxnOffsetCommitRequestTopic,
    accepted: list[TopicOffsets],
    error: ErrorCode | None,
) -> TxnOffsetCommitResponseTopic:
    """Judge the offsets of one topic; those that can be stored are added to `accepted`."""
    topic = broker.catalog.by_name.get(wanted.name)
    offsets: list[PartitionOffset] = []
    results: list[TxnOffsetCommitResponsePartition] = []
    for part in wanted.partitions:
        metadata = part.committed_metadata or ""
        refused = error or refuses_offset(broker, topic, part.partition_index, metadata)
        if refused is None:
            offsets.append(
                PartitionOffset(
                    index=part.partition_index,
                    offset=part.committed_offset,
                    leader_epoch=part.committed_leader_epoch,
                    metadata=metadata,
                )
            )
        results.append(
            TxnOffsetCommitResponsePartition(partition_index=part.partition_index, error_code=refused or 0)
        )
    if topic is not None and offsets:
        accepted.append(TopicOffsets(topic_id=topic.topic_id, partitions=offsets))
    return TxnOffsetCommitResponseTopic(name=wanted.name, partitions=results)
