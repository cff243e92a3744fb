"""Metadata (3), DescribeCluster (60), DescribeTopicPartitions (75), FindCoordinator (10): who serves what.

One broker leads every partition and coordinates every group and transaction, so the answer is always "here".
As with Kafka, the first search for a coordinator of its kind brings the internal topic of that kind about.
"""

from __future__ import annotations

from typing import Final

from semel.broker.authorized_operations import NOT_ASKED, ON_CLUSTER, ON_TOPIC
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.journal_messages import Config, TopicCreated
from semel.broker.topics import (
    INTERNAL_NAMES,
    OFFSETS_TOPIC,
    RESERVED_NAMES,
    TRANSACTIONS_TOPIC,
    Topic,
    refuses_name,
)
from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from semel.wire.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from semel.wire.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from semel.wire.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)

NO_TOPIC_ID: Final = bytes(16)
_MANY_KEYS: Final = 4
_COORDINATOR_KEY_TYPES: Final = (0, 1, 2)
_COORDINATOR_TOPICS: Final = {0: OFFSETS_TOPIC, 1: TRANSACTIONS_TOPIC}
_INTERNAL_PARTITIONS: Final = 1


def metadata(broker: Broker, request: MetadataRequest, caller: Caller, now: Now) -> Decision:
    created: dict[str, TopicCreated] = {}
    if request.topics is None or (caller.api_version == 0 and not request.topics):
        topics = [
            _topic(broker, known.name, known.topic_id, len(known.partitions)) for known in broker.catalog
        ]
    else:
        create = request.allow_auto_topic_creation and broker.limits.auto_create_topics
        topics = [_requested(broker, wanted, create, created) for wanted in request.topics]
    if request.include_topic_authorized_operations:
        for topic in topics:
            topic.topic_authorized_operations = NOT_ASKED if topic.error_code else ON_TOPIC
    reply = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=broker.identity.node_id, host=caller.endpoint.host, port=caller.endpoint.port
            )
        ],
        cluster_id=broker.identity.cluster_id,
        controller_id=broker.identity.node_id,
        topics=topics,
        cluster_authorized_operations=(
            ON_CLUSTER if request.include_cluster_authorized_operations else NOT_ASKED
        ),
    )
    return Decision(reply, list(created.values()))


def _requested(
    broker: Broker, wanted: MetadataRequestTopic, create: bool, created: dict[str, TopicCreated]
) -> MetadataResponseTopic:
    if wanted.name is None:
        topic = broker.catalog.by_id.get(wanted.topic_id)
        if topic is None:
            return MetadataResponseTopic(
                error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=wanted.topic_id, partitions=[]
            )
        return _topic(broker, topic.name, topic.topic_id, len(topic.partitions))
    topic = broker.catalog.by_name.get(wanted.name)
    if topic is not None:
        return _topic(broker, topic.name, topic.topic_id, len(topic.partitions))
    if refuses_name(wanted.name) is not None:
        known = wanted.name in RESERVED_NAMES
        error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if known else ErrorCode.INVALID_TOPIC_EXCEPTION
        return MetadataResponseTopic(error_code=error, name=wanted.name, topic_id=NO_TOPIC_ID, partitions=[])
    partitions = broker.limits.default_partitions
    if not create or broker.catalog.partition_count() + partitions > broker.limits.max_partitions:
        return MetadataResponseTopic(
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            name=wanted.name,
            topic_id=NO_TOPIC_ID,
            partitions=[],
        )
    entry = created.get(wanted.name)
    if entry is None:
        entry = created[wanted.name] = TopicCreated(
            topic_id=broker.new_id(), name=wanted.name, partitions=partitions, configs=[]
        )
    return _topic(broker, entry.name, entry.topic_id, entry.partitions)


def _topic(broker: Broker, name: str, topic_id: bytes, partitions: int) -> MetadataResponseTopic:
    here = [broker.identity.node_id]
    return MetadataResponseTopic(
        error_code=0,
        name=name,
        topic_id=topic_id,
        is_internal=name in INTERNAL_NAMES,
        partitions=[
            MetadataResponsePartition(
                error_code=0,
                partition_index=index,
                leader_id=broker.identity.node_id,
                leader_epoch=broker.leader_epoch,
                replica_nodes=here,
                isr_nodes=here,
            )
            for index in range(partitions)
        ],
    )


def describe_cluster(broker: Broker, request: DescribeClusterRequest, caller: Caller, now: Now) -> Decision:
    if request.endpoint_type != 1:
        return Decision(
            DescribeClusterResponse(
                error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE,
                error_message="this is a broker endpoint; there are no controller endpoints",
                endpoint_type=1,
                cluster_id=broker.identity.cluster_id,
                brokers=[],
            )
        )
    here = DescribeClusterBroker(
        broker_id=broker.identity.node_id, host=caller.endpoint.host, port=caller.endpoint.port
    )
    return Decision(
        DescribeClusterResponse(
            cluster_id=broker.identity.cluster_id,
            controller_id=broker.identity.node_id,
            brokers=[here],
            cluster_authorized_operations=(
                ON_CLUSTER if request.include_cluster_authorized_operations else NOT_ASKED
            ),
        )
    )


def describe_topic_partitions(
    broker: Broker, request: DescribeTopicPartitionsRequest, caller: Caller, now: Now
) -> Decision:
    """Topics by name, at most `response_partition_limit` partitions; the cursor says where to go on."""
    names = sorted({topic.name for topic in request.topics} or set(broker.catalog.by_name))
    cursor = request.cursor
    first_partition = 0
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
        first_partition = cursor.partition_index if names[:1] == [cursor.topic_name] else 0
    room = max(1, request.response_partition_limit)
    topics: list[DescribeTopicPartitionsResponseTopic] = []
    for name in names:
        if room <= 0:
            return Decision(DescribeTopicPartitionsResponse(topics=topics, next_cursor=Cursor(name, 0)))
        topic = broker.catalog.by_name.get(name)
        if topic is None:
            topics.append(_unknown(name))
            continue
        end = min(len(topic.partitions), first_partition + room)
        topics.append(_described(broker, topic, first_partition, end))
        room -= end - first_partition
        if end < len(topic.partitions):
            return Decision(DescribeTopicPartitionsResponse(topics=topics, next_cursor=Cursor(name, end)))
        first_partition = 0
    return Decision(DescribeTopicPartitionsResponse(topics=topics))


def _unknown(name: str) -> DescribeTopicPartitionsResponseTopic:
    error = (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if refuses_name(name) is None
        else ErrorCode.INVALID_TOPIC_EXCEPTION
    )
    return DescribeTopicPartitionsResponseTopic(
        error_code=error, name=name, topic_id=NO_TOPIC_ID, partitions=[]
    )


def _described(broker: Broker, topic: Topic, first: int, end: int) -> DescribeTopicPartitionsResponseTopic:
    here = [broker.identity.node_id]
    return DescribeTopicPartitionsResponseTopic(
        error_code=0,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                error_code=0,
                partition_index=index,
                leader_id=broker.identity.node_id,
                leader_epoch=broker.leader_epoch,
                replica_nodes=here,
                isr_nodes=here,
                eligible_leader_replicas=[],
                last_known_elr=[],
            )
            for index in range(first, end)
        ],
        topic_authorized_operations=ON_TOPIC,
    )


def find_coordinator(broker: Broker, request: FindCoordinatorRequest, caller: Caller, now: Now) -> Decision:
    keys = request.coordinator_keys if caller.api_version >= _MANY_KEYS else [request.key]
    error, message = 0, None
    if request.key_type not in _COORDINATOR_KEY_TYPES:
        error, message = int(ErrorCode.INVALID_REQUEST), f"{request.key_type} is no type of coordinator"
    node_id, host, port = broker.identity.node_id, caller.endpoint.host, caller.endpoint.port
    if error:
        node_id, host, port = -1, "", -1
    coordinators = [
        Coordinator(key=key, node_id=node_id, host=host, port=port, error_code=error, error_message=message)
        for key in keys
    ]
    return Decision(
        FindCoordinatorResponse(
            coordinators=coordinators,
            error_code=error,
            error_message=message,
            node_id=node_id,
            host=host,
            port=port,
        ),
        _missing_internal_topic(broker, request.key_type),
    )


def _missing_internal_topic(broker: Broker, key_type: int) -> list[Entry]:
    name = _COORDINATOR_TOPICS.get(key_type)
    room = broker.limits.max_partitions - broker.catalog.partition_count()
    if name is None or name in broker.catalog.by_name or room < _INTERNAL_PARTITIONS:
        return []
    compacted = Config(name="cleanup.policy", value="compact")
    return [
        TopicCreated(
            topic_id=broker.new_id(), name=name, partitions=_INTERNAL_PARTITIONS, configs=[compacted]
        )
    ]
