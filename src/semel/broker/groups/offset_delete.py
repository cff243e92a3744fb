"""OffsetDelete (47): forget offsets of topics that a group does not read any more."""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.group_messages import OffsetsRemoved, TopicPartitions
from semel.broker.groups.classic import CONSUMER_PROTOCOL_TYPE
from semel.broker.groups.group import Group
from semel.wire.errors import ErrorCode
from semel.wire.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)


def offset_delete(broker: Broker, request: OffsetDeleteRequest, caller: Caller, now: Now) -> Decision:
    if not request.group_id:
        return Decision(OffsetDeleteResponse(error_code=ErrorCode.INVALID_GROUP_ID))
    group = broker.groups.by_id.get(request.group_id)
    if group is None:
        return Decision(OffsetDeleteResponse(error_code=ErrorCode.GROUP_ID_NOT_FOUND))
    membership = group.membership
    if not membership.is_empty and membership.protocol_type != CONSUMER_PROTOCOL_TYPE:
        # Only consumers say in a known form what they read.
        return Decision(OffsetDeleteResponse(error_code=ErrorCode.NON_EMPTY_GROUP))
    removed: list[TopicPartitions] = []
    topics = [_delete(broker, group, topic, removed) for topic in request.topics]
    entries: list[Entry] = []
    if removed:
        entries.append(OffsetsRemoved(group_id=group.group_id, topics=removed))
    return Decision(OffsetDeleteResponse(topics=topics), entries)


def _delete(
    broker: Broker, group: Group, wanted: OffsetDeleteRequestTopic, removed: list[TopicPartitions]
) -> OffsetDeleteResponseTopic:
    topic = broker.catalog.by_name.get(wanted.name)
    is_read = group.membership.is_subscribed_to(wanted.name)
    indexes: list[int] = []
    results: list[OffsetDeleteResponsePartition] = []
    for part in wanted.partitions:
        index = part.partition_index
        error = ErrorCode.NONE
        if topic is None or topic.partition(index) is None:
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        elif is_read:
            error = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        elif group.offsets.get(topic.topic_id, index) or group.offsets.is_pending(topic.topic_id, index):
            indexes.append(index)
        results.append(OffsetDeleteResponsePartition(partition_index=index, error_code=error))
    if indexes:
        assert topic is not None
        removed.append(TopicPartitions(topic_id=topic.topic_id, indexes=indexes))
    return OffsetDeleteResponseTopic(name=wanted.name, partitions=results)
