"""OffsetCommit (8): remember how far a group has come.

Versions 2 to 4 may name a retention of their own; version 10 names topics by id. A commit outside of any
group membership makes a *simple* group, of offsets only.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.group_messages import OffsetsCommitted, PartitionOffset, TopicOffsets
from semel.broker.groups.classic import ClassicMembership, State
from semel.broker.groups.offsets import NO_EXPIRY
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.settings import MAX_GROUPS
from semel.broker.topics import Topic
from semel.wire.errors import ErrorCode
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)

_BY_ID_FROM: Final = 10
_GROUP_NOT_FOUND_FROM: Final = 9


def offset_commit(broker: Broker, request: OffsetCommitRequest, caller: Caller, now: Now) -> Decision:
    error = _refuses(broker, request, caller.api_version)
    accepted: list[TopicOffsets] = []
    topics = [_commit_topic(broker, wanted, error, caller.api_version, accepted) for wanted in request.topics]
    entries: list[Entry] = []
    if error is None:
        _keep_alive(broker, request, now)
    if accepted:
        expires_at_ms = (
            NO_EXPIRY if request.retention_time_ms < 0 else now.wall_ms + request.retention_time_ms
        )
        entries.append(
            OffsetsCommitted(
                group_id=request.group_id,
                committed_at_ms=now.wall_ms,
                expires_at_ms=expires_at_ms,
                topics=accepted,
            )
        )
    return Decision(OffsetCommitResponse(topics=topics), entries)


def refuses_offset(broker: Broker, topic: Topic | None, index: int, metadata: str) -> ErrorCode | None:
    """Why the offset of one partition cannot be stored, in a transaction or outside of one; or None."""
    if topic is None or topic.partition(index) is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if len(metadata) > broker.groups.settings.max_offset_metadata_chars:
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return None


def _refuses(broker: Broker, request: OffsetCommitRequest, api_version: int) -> ErrorCode | None:
    """Why the group takes no offsets from this member, or None."""
    generation = request.generation_id_or_member_epoch
    group = broker.groups.by_id.get(request.group_id)
    if group is not None:
        return group.membership.refuses_commit(
            request.member_id,
            generation,
            request.group_instance_id,
            transactional=False,
            api_version=api_version,
        )
    if generation >= 0:
        return (
            ErrorCode.GROUP_ID_NOT_FOUND
            if api_version >= _GROUP_NOT_FOUND_FROM
            else ErrorCode.ILLEGAL_GENERATION
        )
    return ErrorCode.GROUP_MAX_SIZE_REACHED if len(broker.groups.by_id) >= MAX_GROUPS else None


def _commit_topic(
    broker: Broker,
    wanted: OffsetCommitRequestTopic,
    error: ErrorCode | None,
    api_version: int,
    accepted: list[TopicOffsets],
) -> OffsetCommitResponseTopic:
    """Judge the offsets of one topic; those that can be stored are added to `accepted`."""
    if api_version >= _BY_ID_FROM:
        topic = broker.catalog.by_id.get(wanted.topic_id)
        if topic is None:
            error = ErrorCode.UNKNOWN_TOPIC_ID
    else:
        topic = broker.catalog.by_name.get(wanted.name)
    offsets: list[PartitionOffset] = []
    results: list[OffsetCommitResponsePartition] = []
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
            OffsetCommitResponsePartition(partition_index=part.partition_index, error_code=refused or 0)
        )
    if offsets:
        assert topic is not None
        accepted.append(TopicOffsets(topic_id=topic.topic_id, partitions=offsets))
    return OffsetCommitResponseTopic(topic_id=wanted.topic_id, name=wanted.name, partitions=results)


def _keep_alive(broker: Broker, request: OffsetCommitRequest, now: Now) -> None:
    """A commit is a sign of life, as good as a heartbeat."""
    group = broker.groups.by_id.get(request.group_id)
    membership = None if group is None else group.membership
    if not isinstance(membership, ClassicMembership):
        return  # Members of the other protocol have their heartbeats for that.
    member = membership.members.get(request.member_id)
    if member is not None and membership.state in (State.STABLE, State.PREPARING_REBALANCE):
        Rebalance(broker.groups, membership, now).touch(member)
