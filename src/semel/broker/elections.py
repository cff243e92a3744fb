"""ElectLeaders (43), AlterPartitionReassignments (45), ListPartitionReassignments (46): who leads what.

There is one broker, and it is the only replica, the preferred one and the leader of every partition. So no
election is ever needed, and the only assignment that can be asked for is the one that there is.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.refusal import Refused
from semel.wire.errors import ErrorCode
from semel.wire.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from semel.wire.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from semel.wire.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

_KINDS: Final = (0, 1)
"""Of the preferred leader, and of any replica (unclean)."""
_HAS_ERROR_FROM: Final = 1
"""Since this version the answer has an error for the whole."""


def elect_leaders(broker: Broker, request: ElectLeadersRequest, caller: Caller, now: Now) -> Decision:
    kind = request.election_type
    # Asked about all partitions, Kafka lists those that had an election: here there is none.
    results = [
        ReplicaElectionResult(
            topic=wanted.topic,
            partition_result=[_election(broker, kind, wanted.topic, index) for index in wanted.partitions],
        )
        for wanted in request.topic_partitions or ()
    ]
    reply = ElectLeadersResponse(replica_election_results=results)
    if kind not in _KINDS and caller.api_version >= _HAS_ERROR_FROM:
        reply.error_code = ErrorCode.INVALID_REQUEST
    return Decision(reply)


def _election(broker: Broker, kind: int, name: str, index: int) -> PartitionResult:
    if kind not in _KINDS:
        return PartitionResult(
            partition_id=index,
            error_code=ErrorCode.INVALID_REQUEST,
            error_message=f"there is no election of type {kind}: 0 is the preferred leader, 1 any replica",
        )
    if broker.catalog.partition(name, index) is None:
        return PartitionResult(
            partition_id=index,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=f"there is no partition {name}-{index}",
        )
    return PartitionResult(
        partition_id=index,
        error_code=ErrorCode.ELECTION_NOT_NEEDED,
        error_message=f"broker {broker.identity.node_id} leads {name}-{index} already",
    )


def alter_partition_reassignments(
    broker: Broker, request: AlterPartitionReassignmentsRequest, caller: Caller, now: Now
) -> Decision:
    return Decision(
        AlterPartitionReassignmentsResponse(
            allow_replication_factor_change=request.allow_replication_factor_change,
            responses=[
                ReassignableTopicResponse(
                    name=topic.name,
                    partitions=[_reassigned(broker, topic.name, wanted) for wanted in topic.partitions],
                )
                for topic in request.topics
            ],
        )
    )


def _reassigned(broker: Broker, name: str, wanted: ReassignablePartition) -> ReassignablePartitionResponse:
    result = ReassignablePartitionResponse(partition_index=wanted.partition_index)
    try:
        _check_reassignment(broker, name, wanted)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.reason
    return result


def _check_reassignment(broker: Broker, name: str, wanted: ReassignablePartition) -> None:
    where = f"{name}-{wanted.partition_index}"
    if broker.catalog.partition(name, wanted.partition_index) is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {where}")
    here = broker.identity.node_id
    replicas = wanted.replicas
    if replicas is None:
        raise Refused(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{where} is not being reassigned")
    if replicas == [here]:
        return
    raise Refused(
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        f"{where} cannot be assigned to {replicas}: there is one broker, {here}",
    )


def list_partition_reassignments(
    broker: Broker, request: ListPartitionReassignmentsRequest, caller: Caller, now: Now
) -> Decision:
    return Decision(ListPartitionReassignmentsResponse())
