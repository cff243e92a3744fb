"""OffsetForLeaderEpoch (23): where an epoch ended, so that a client can see whether its log and ours part."""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.topics import Partition
from semel.wire.errors import ErrorCode
from semel.wire.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)

ANY_EPOCH = -1


def refuses_epoch(broker: Broker, current_leader_epoch: int) -> ErrorCode | None:
    """Whether the client knows another leader epoch than ours, and who of us is behind."""
    if current_leader_epoch in (ANY_EPOCH, broker.leader_epoch):
        return None
    if current_leader_epoch < broker.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    return ErrorCode.UNKNOWN_LEADER_EPOCH


def offset_for_leader_epoch(
    broker: Broker, request: OffsetForLeaderEpochRequest, caller: Caller, now: Now
) -> Decision:
    topics = [
        OffsetForLeaderTopicResult(
            topic=topic.topic,
            partitions=[
                _answer(broker, broker.catalog.partition(topic.topic, wanted.partition), wanted)
                for wanted in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return Decision(OffsetForLeaderEpochResponse(topics=topics))


def _answer(broker: Broker, partition: Partition | None, wanted: OffsetForLeaderPartition) -> EpochEndOffset:
    if partition is None:
        return EpochEndOffset(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, partition=wanted.partition)
    error = refuses_epoch(broker, wanted.current_leader_epoch)
    if error is not None:
        return EpochEndOffset(error_code=error, partition=wanted.partition)
    end = partition.log.end_of_epoch(wanted.leader_epoch)
    return EpochEndOffset(
        error_code=0, partition=wanted.partition, leader_epoch=end.epoch, end_offset=end.start_offset
    )
