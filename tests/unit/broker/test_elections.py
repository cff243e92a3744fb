"""Claims about elections and reassignments: there is one broker, and it says so."""

import pytest
from broker_cases import caller, new_broker, now, with_topic

from semel.broker.elections import (
    alter_partition_reassignments,
    elect_leaders,
    list_partition_reassignments,
)
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
)


def elect(request: ElectLeadersRequest, version: int = 2) -> ElectLeadersResponse:
    reply = elect_leaders(with_topic(new_broker(), partitions=2), request, caller(version), now()).reply
    assert isinstance(reply, ElectLeadersResponse)
    return reply


def test_no_election_is_needed_where_the_leader_is_the_preferred_one() -> None:
    wanted = [TopicPartitions(topic="t", partitions=[0, 2]), TopicPartitions(topic="u", partitions=[0])]
    results = elect(ElectLeadersRequest(topic_partitions=wanted)).replica_election_results
    codes = {
        (result.topic, part.partition_id): part.error_code
        for result in results
        for part in result.partition_result
    }
    assert codes == {
        ("t", 0): ErrorCode.ELECTION_NOT_NEEDED,
        ("t", 2): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ("u", 0): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_an_election_of_everything_elects_nobody() -> None:
    reply = elect(ElectLeadersRequest(topic_partitions=None))
    assert (reply.error_code, reply.replica_election_results) == (0, [])


def test_an_unknown_kind_of_election_is_refused() -> None:
    wanted = [TopicPartitions(topic="t", partitions=[0])]
    reply = elect(ElectLeadersRequest(election_type=7, topic_partitions=wanted))
    assert reply.error_code == ErrorCode.INVALID_REQUEST
    (result,) = reply.replica_election_results[0].partition_result
    assert result.error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("index", "replicas", "may_change_factor", "code"),
    [
        (0, [1], True, 0),
        (0, None, True, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
        (0, [2], True, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (0, [1, 2], True, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (0, [1, 2], False, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (0, [], True, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (9, [1], True, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_a_partition_can_only_be_assigned_to_where_it_is(
    index: int, replicas: list[int] | None, may_change_factor: bool, code: int
) -> None:
    partition = ReassignablePartition(partition_index=index, replicas=replicas)
    request = AlterPartitionReassignmentsRequest(
        allow_replication_factor_change=may_change_factor,
        topics=[ReassignableTopic(name="t", partitions=[partition])],
    )
    decision = alter_partition_reassignments(with_topic(new_broker()), request, caller(1), now())
    assert isinstance(decision.reply, AlterPartitionReassignmentsResponse)
    assert decision.reply.responses[0].partitions[0].error_code == code
    assert decision.entries == []


def test_no_reassignment_is_ever_under_way() -> None:
    reply = list_partition_reassignments(
        with_topic(new_broker()), ListPartitionReassignmentsRequest(), caller(0), now()
    ).reply
    assert isinstance(reply, ListPartitionReassignmentsResponse)
    assert (reply.error_code, reply.topics) == (0, [])
