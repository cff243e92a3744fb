"""The same elections and reassignments asked of this broker and of Apache Kafka: the same error codes."""

from __future__ import annotations

import uuid
from typing import Final

from broker_process import StartBroker
from kafka_process import KafkaProcess
from raw_client import RawClient, create_topic

from semel.wire.errors import ErrorCode
from semel.wire.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignableTopic,
)
from semel.wire.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
from semel.wire.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListPartitionReassignmentsTopics,
)

TIMEOUT_MS: Final = 10_000
KINDS: Final = (0, 1, 2)
ASSIGNMENTS: Final[tuple[list[int] | None, ...]] = (None, [1], [2], [1, 2], [], [1, 1], [-1])
"""Both brokers have the id 1."""

Trace = dict[tuple[object, ...], object]


def elections(client: RawClient, topic: str) -> Trace:
    trace: Trace = {}
    for version in range(3):
        for kind in KINDS if version else (0,):
            for name, index in (("known", 0), ("known", 5), ("unknown", 0)):
                wanted = TopicPartitions(topic=topic if name == "known" else "nobody", partitions=[index])
                request = ElectLeadersRequest(
                    election_type=kind, topic_partitions=[wanted], timeout_ms=TIMEOUT_MS
                )
                answer = client.ask(request, version, ElectLeadersResponse)
                (result,) = answer.replica_election_results[0].partition_result
                codes = ErrorCode(answer.error_code).name, ErrorCode(result.error_code).name
                trace["elect", version, kind, name, index] = codes
    return trace


def reassignments(client: RawClient, topic: str) -> Trace:
    trace: Trace = {}
    for version, may_change_factor in ((0, True), (1, True), (1, False)):
        for replicas in ASSIGNMENTS:
            for name, index in (("known", 0), ("known", 5), ("unknown", 0)):
                partition = ReassignablePartition(partition_index=index, replicas=replicas)
                wanted = ReassignableTopic(
                    name=topic if name == "known" else "nobody", partitions=[partition]
                )
                request = AlterPartitionReassignmentsRequest(
                    timeout_ms=TIMEOUT_MS, allow_replication_factor_change=may_change_factor, topics=[wanted]
                )
                answer = client.ask(request, version, AlterPartitionReassignmentsResponse)
                (result,) = answer.responses[0].partitions
                codes = ErrorCode(answer.error_code).name, ErrorCode(result.error_code).name
                trace["reassign", version, may_change_factor, str(replicas), name, index] = codes
    return trace


def listings(client: RawClient, topic: str) -> Trace:
    trace: Trace = {}
    wanted: dict[str, list[ListPartitionReassignmentsTopics] | None] = {
        "all": None,
        "known": [ListPartitionReassignmentsTopics(name=topic, partition_indexes=[0, 5])],
        "unknown": [ListPartitionReassignmentsTopics(name="nobody", partition_indexes=[0])],
    }
    for label, topics in wanted.items():
        request = ListPartitionReassignmentsRequest(timeout_ms=TIMEOUT_MS, topics=topics)
        answer = client.ask(request, 0, ListPartitionReassignmentsResponse)
        trace["list", label] = ErrorCode(answer.error_code).name, answer.topics
    return trace


def asked(port: int) -> Trace:
    topic = f"t-{uuid.uuid4().hex[:10]}"
    with RawClient(port) as client:
        create_topic(client, topic)
        return elections(client, topic) | reassignments(client, topic) | listings(client, topic)


def test_elections_and_reassignments_get_the_same_error_codes(
    start_broker: StartBroker, kafka_broker: KafkaProcess
) -> None:
    ours, theirs = asked(start_broker(in_memory=True).port), asked(kafka_broker.port)
    assert ours == theirs
    assert len(ours) > 60
