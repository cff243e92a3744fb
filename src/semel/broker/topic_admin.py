"""CreateTopics (19), DeleteTopics (20), CreatePartitions (37), DeleteRecords (21): topics come, grow and go.

Each topic of a request is judged on its own. What is accepted goes into one journal group.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from semel.broker.configs import check_topic_configs
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.describe_configs import created_topic_configs
from semel.broker.entries import Entry
from semel.broker.journal_messages import Config, LogStartMoved, PartitionsAdded, TopicCreated, TopicDeleted
from semel.broker.refusal import Refused
from semel.broker.topics import Topic, refuses_name
from semel.errors import ConfigError
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from semel.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from semel.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from semel.wire.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)

NO_TOPIC_ID: Final = bytes(16)
_BY_ID: Final = 6
REPLICATION_FACTOR: Final = 1
_TO_HIGH_WATERMARK: Final = -1


def create_topics(broker: Broker, request: CreateTopicsRequest, caller: Caller, now: Now) -> Decision:
    named = Counter(wanted.name for wanted in request.topics)
    entries: list[Entry] = []
    results = []
    room = broker.limits.max_partitions - broker.catalog.partition_count()
    for wanted in request.topics:
        try:
            if named[wanted.name] > 1:
                raise Refused(
                    ErrorCode.INVALID_REQUEST, f"topic '{wanted.name}' is named twice in one request"
                )
            entry = _creation(broker, wanted, room)
            room -= entry.partitions
            entries.append(entry)
            results.append(
                CreatableTopicResult(
                    name=entry.name,
                    topic_id=NO_TOPIC_ID if request.validate_only else entry.topic_id,
                    error_code=0,
                    error_message=None,
                    num_partitions=entry.partitions,
                    replication_factor=REPLICATION_FACTOR,
                    configs=created_topic_configs(
                        broker, {config.name: config.value for config in entry.configs}
                    ),
                )
            )
        except Refused as refused:
            results.append(
                CreatableTopicResult(
                    name=wanted.name,
                    topic_id=NO_TOPIC_ID,
                    error_code=refused.code,
                    error_message=refused.reason,
                    configs=[],
                )
            )
    return Decision(CreateTopicsResponse(topics=results), [] if request.validate_only else entries)


def _creation(broker: Broker, wanted: CreatableTopic, room: int) -> TopicCreated:
    reason = refuses_name(wanted.name)
    if reason is not None:
        raise Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, f"illegal topic name: {reason}")
    if wanted.name in broker.catalog.by_name:
        raise Refused(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic '{wanted.name}' already exists")
    partitions = _partition_count(broker, wanted)
    if partitions > room:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"{partitions} more partitions would exceed the broker's limit of {broker.limits.max_partitions}",
        )
    configs = {config.name: config.value for config in wanted.configs if config.value is not None}
    try:
        check_topic_configs(configs)
    except ConfigError as error:
        raise Refused(ErrorCode.INVALID_CONFIG, str(error)) from None
    return TopicCreated(
        topic_id=broker.new_id(),
        name=wanted.name,
        partitions=partitions,
        configs=[Config(name=name, value=value) for name, value in configs.items()],
    )


def _partition_count(broker: Broker, wanted: CreatableTopic) -> int:
    if wanted.assignments:
        return _assigned_partitions(broker, wanted)
    if wanted.replication_factor not in (-1, REPLICATION_FACTOR):
        raise Refused(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"there is 1 broker, so replication factor {wanted.replication_factor} cannot be; use 1 or -1",
        )
    if wanted.num_partitions == -1:
        return broker.limits.default_partitions
    if wanted.num_partitions < 1:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS, f"a topic needs at least 1 partition, not {wanted.num_partitions}"
        )
    return wanted.num_partitions


def _assigned_partitions(broker: Broker, wanted: CreatableTopic) -> int:
    if wanted.num_partitions != -1 or wanted.replication_factor != -1:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            "give either assignments or counts: with assignments both counts must be -1",
        )
    indexes = sorted(assignment.partition_index for assignment in wanted.assignments)
    if indexes != list(range(len(indexes))):
        raise Refused(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions must be numbered from 0 without gaps")
    if any(assignment.broker_ids != [broker.identity.node_id] for assignment in wanted.assignments):
        raise Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"the only broker to assign is {broker.identity.node_id}"
        )
    return len(indexes)


def delete_topics(broker: Broker, request: DeleteTopicsRequest, caller: Caller, now: Now) -> Decision:
    wanted = request.topics
    if caller.api_version < _BY_ID:
        wanted = [DeleteTopicState(name=name, topic_id=NO_TOPIC_ID) for name in request.topic_names]
    entries: dict[bytes, Entry] = {}
    results = []
    for state in wanted:
        try:
            topic = _to_delete(broker, state)
            if topic.topic_id in entries:
                raise Refused(
                    ErrorCode.INVALID_REQUEST, f"topic '{topic.name}' is named twice in one request"
                )
            entries[topic.topic_id] = TopicDeleted(topic_id=topic.topic_id)
            results.append(DeletableTopicResult(name=topic.name, topic_id=topic.topic_id, error_code=0))
        except Refused as refused:
            results.append(
                DeletableTopicResult(
                    name=state.name,
                    topic_id=state.topic_id,
                    error_code=refused.code,
                    error_message=refused.reason,
                )
            )
    return Decision(DeleteTopicsResponse(responses=results), list(entries.values()))


def _to_delete(broker: Broker, state: DeleteTopicState) -> Topic:
    if state.name is None:
        topic = broker.catalog.by_id.get(state.topic_id)
        if topic is None:
            raise Refused(ErrorCode.UNKNOWN_TOPIC_ID, f"there is no topic with id {state.topic_id.hex()}")
        return topic
    if state.topic_id != NO_TOPIC_ID:
        raise Refused(ErrorCode.INVALID_REQUEST, "give a topic's name or its id, not both")
    topic = broker.catalog.by_name.get(state.name)
    if topic is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{state.name}'")
    return topic


def create_partitions(broker: Broker, request: CreatePartitionsRequest, caller: Caller, now: Now) -> Decision:
    named = Counter(wanted.name for wanted in request.topics)
    entries: list[Entry] = []
    results = []
    room = broker.limits.max_partitions - broker.catalog.partition_count()
    for wanted in request.topics:
        try:
            if named[wanted.name] > 1:
                raise Refused(
                    ErrorCode.INVALID_REQUEST, f"topic '{wanted.name}' is named twice in one request"
                )
            topic = _to_grow(broker, wanted, room)
            room -= wanted.count - len(topic.partitions)
            entries.append(PartitionsAdded(topic_id=topic.topic_id, count=wanted.count))
            results.append(CreatePartitionsTopicResult(name=wanted.name, error_code=0))
        except Refused as refused:
            results.append(
                CreatePartitionsTopicResult(
                    name=wanted.name, error_code=refused.code, error_message=refused.reason
                )
            )
    return Decision(CreatePartitionsResponse(results=results), [] if request.validate_only else entries)


def _to_grow(broker: Broker, wanted: CreatePartitionsTopic, room: int) -> Topic:
    topic = broker.catalog.by_name.get(wanted.name)
    if topic is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{wanted.name}'")
    added = wanted.count - len(topic.partitions)
    if added <= 0:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"topic '{topic.name}' has {len(topic.partitions)} partitions; the count can only be raised",
        )
    if added > room:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"{added} more partitions would exceed this broker's limit of {broker.limits.max_partitions}",
        )
    if wanted.assignments is not None and (
        len(wanted.assignments) != added
        or any(assignment.broker_ids != [broker.identity.node_id] for assignment in wanted.assignments)
    ):
        raise Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"assign each of the {added} new partitions to the only broker, {broker.identity.node_id}",
        )
    return topic


def delete_records(broker: Broker, request: DeleteRecordsRequest, caller: Caller, now: Now) -> Decision:
    entries: list[Entry] = []
    topics = [
        DeleteRecordsTopicResult(
            name=topic.name,
            partitions=[_delete_below(broker, topic.name, wanted, entries) for wanted in topic.partitions],
        )
        for topic in request.topics
    ]
    return Decision(DeleteRecordsResponse(topics=topics), entries)


def _delete_below(
    broker: Broker, name: str, wanted: DeleteRecordsPartition, entries: list[Entry]
) -> DeleteRecordsPartitionResult:
    partition = broker.catalog.partition(name, wanted.partition_index)
    if partition is None:
        return DeleteRecordsPartitionResult(
            partition_index=wanted.partition_index,
            low_watermark=-1,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
    log = partition.log
    offset = log.high_watermark if wanted.offset == _TO_HIGH_WATERMARK else wanted.offset
    if not 0 <= offset <= log.high_watermark:
        return DeleteRecordsPartitionResult(
            partition_index=wanted.partition_index, low_watermark=-1, error_code=ErrorCode.OFFSET_OUT_OF_RANGE
        )
    if offset > log.log_start_offset:
        entries.append(
            LogStartMoved(topic_id=partition.topic.topic_id, index=partition.index, log_start_offset=offset)
        )
    return DeleteRecordsPartitionResult(
        partition_index=wanted.partition_index, low_watermark=max(offset, log.log_start_offset), error_code=0
    )
