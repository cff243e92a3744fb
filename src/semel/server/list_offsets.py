"""ListOffsets (2): the start, the end, or the first offset at a time."""

from __future__ import annotations

from typing import Final

from semel.broker.leader_epochs import refuses_epoch
from semel.broker.topics import Partition
from semel.server.fetch import READ_COMMITTED
from semel.server.life import Life
from semel.wire.errors import ErrorCode
from semel.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5


def list_offsets(life: Life, request: ListOffsetsRequest) -> ListOffsetsResponse:
    committed = request.isolation_level == READ_COMMITTED
    topics = [
        ListOffsetsTopicResponse(
            name=topic.name,
            partitions=[_answer(life, topic.name, wanted, committed) for wanted in topic.partitions],
        )
        for topic in request.topics
    ]
    return ListOffsetsResponse(topics=topics)


def _answer(
    life: Life, name: str, wanted: ListOffsetsPartition, committed: bool
) -> ListOffsetsPartitionResponse:
    answer = ListOffsetsPartitionResponse(partition_index=wanted.partition_index)
    partition = life.broker.catalog.partition(name, wanted.partition_index)
    if partition is None:
        answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    error = refuses_epoch(life.broker, wanted.current_leader_epoch)
    if error is not None:
        answer.error_code = error
        return answer
    found = _look_up(life, partition, wanted.timestamp, committed)
    if found is not None:
        answer.timestamp, answer.offset = found
        if answer.offset >= 0:
            answer.leader_epoch = partition.log.epoch_at(answer.offset)
    return answer


def _look_up(life: Life, partition: Partition, timestamp: int, committed: bool) -> tuple[int, int] | None:
    """The timestamp and the offset to answer, or None if nothing fits."""
    log = partition.log
    end_offset = log.last_stable_offset if committed else log.high_watermark
    if timestamp == LATEST:
        return -1, end_offset
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.shown_start_offset
    view = life.store.partition(partition.topic.topic_id, partition.index)
    if timestamp == MAX_TIMESTAMP:
        found = view.max_timestamp(log.shown_start_offset, end_offset)
    elif timestamp < 0:
        return None  # The end of tiered storage, which there is none of, and whatever may come.
    else:
        found = view.offset_for_time(timestamp, log.shown_start_offset, end_offset)
    return None if found is None else (found.timestamp, found.offset)
