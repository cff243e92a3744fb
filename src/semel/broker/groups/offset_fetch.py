"""OffsetFetch (9): how far groups have come; several groups at once since v8, topics by id since v10.

With `require_stable` a partition whose offset an open transaction may still move is answered with
UNSTABLE_OFFSET_COMMIT, and the client asks again; without it the last committed offset is told. The answer
leaves when everything that it rests on is durable.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.group import Group
from semel.broker.topics import Topic
from semel.wire.errors import ErrorCode
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)

_SEVERAL_FROM: Final = 8
_BY_ID_FROM: Final = 10
_NO_OFFSET: Final = -1


def offset_fetch(broker: Broker, request: OffsetFetchRequest, caller: Caller, now: Now) -> Decision:
    if caller.api_version >= _SEVERAL_FROM:
        by_id = caller.api_version >= _BY_ID_FROM
        groups = [_fetch(broker, wanted, request.require_stable, by_id) for wanted in request.groups]
        return Decision(OffsetFetchResponse(groups=groups))
    wanted = OffsetFetchRequestGroup(
        group_id=request.group_id,
        topics=None
        if request.topics is None
        else [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ],
    )
    fetched = _fetch(broker, wanted, request.require_stable, by_id=False)
    return Decision(OffsetFetchResponse(topics=[_in_old_form(topic) for topic in fetched.topics]))


def _fetch(
    broker: Broker, wanted: OffsetFetchRequestGroup, require_stable: bool, by_id: bool
) -> OffsetFetchResponseGroup:
    group = broker.groups.by_id.get(wanted.group_id)
    if group is not None and isinstance(group.membership, ConsumerMembership):
        error = group.membership.refuses_fetch(wanted.member_id, wanted.member_epoch)
        if error is not None:
            return OffsetFetchResponseGroup(group_id=wanted.group_id, error_code=error)
    if wanted.topics is not None:
        topics = [_fetch_topic(broker, group, topic, require_stable, by_id) for topic in wanted.topics]
    elif group is not None:
        topics = _fetch_all(broker, group, require_stable)
    else:
        topics = []
    return OffsetFetchResponseGroup(group_id=wanted.group_id, topics=topics, error_code=0)


def _fetch_topic(
    broker: Broker, group: Group | None, wanted: OffsetFetchRequestTopics, require_stable: bool, by_id: bool
) -> OffsetFetchResponseTopics:
    topic = broker.catalog.by_id.get(wanted.topic_id) if by_id else broker.catalog.by_name.get(wanted.name)
    unknown = ErrorCode.UNKNOWN_TOPIC_ID if by_id and topic is None else ErrorCode.NONE
    return OffsetFetchResponseTopics(
        topic_id=wanted.topic_id,
        name=wanted.name,
        partitions=[
            _nothing(index, unknown)
            if group is None or topic is None
            else _fetch_partition(group, topic, index, require_stable)
            for index in wanted.partition_indexes
        ],
    )


def _fetch_all(broker: Broker, group: Group, require_stable: bool) -> list[OffsetFetchResponseTopics]:
    """Every offset of the group, but for those of topics that are gone and not cleaned up yet."""
    topics = []
    for topic_id, offsets in group.offsets.committed.items():
        topic = broker.catalog.by_id.get(topic_id)
        if topic is not None:
            topics.append(
                OffsetFetchResponseTopics(
                    topic_id=topic_id,
                    name=topic.name,
                    partitions=[
                        _fetch_partition(group, topic, index, require_stable) for index in sorted(offsets)
                    ],
                )
            )
    return topics


def _fetch_partition(
    group: Group, topic: Topic, index: int, require_stable: bool
) -> OffsetFetchResponsePartitions:
    if require_stable and group.offsets.is_pending(topic.topic_id, index):
        return _nothing(index, ErrorCode.UNSTABLE_OFFSET_COMMIT)
    offset = group.offsets.get(topic.topic_id, index)
    if offset is None:
        return _nothing(index, ErrorCode.NONE)
    return OffsetFetchResponsePartitions(
        partition_index=index,
        committed_offset=offset.offset,
        committed_leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
    )


def _nothing(index: int, error: ErrorCode) -> OffsetFetchResponsePartitions:
    return OffsetFetchResponsePartitions(
        partition_index=index, committed_offset=_NO_OFFSET, metadata="", error_code=error
    )


def _in_old_form(topic: OffsetFetchResponseTopics) -> OffsetFetchResponseTopic:
    return OffsetFetchResponseTopic(
        name=topic.name,
        partitions=[
            OffsetFetchResponsePartition(
                partition_index=part.partition_index,
                committed_offset=part.committed_offset,
                committed_leader_epoch=part.committed_leader_epoch,
                metadata=part.metadata,
                error_code=part.error_code,
            )
            for part in topic.partitions
        ],
    )
