"""ListTransactions, DescribeTransactions and DescribeProducers: who writes, and what is open."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_cases import NONE, OTHER_TOPIC, TIMEOUT_MS, TOPIC, Bench, opened, started, write

from semel.broker.transactions.describing import (
    describe_producers,
    describe_transactions,
    list_transactions,
)
from semel.wire.errors import ErrorCode
from semel.wire.messages import describe_producers as producers
from semel.wire.messages.describe_transactions import DescribeTransactionsRequest
from semel.wire.messages.list_transactions import ListTransactionsRequest


@pytest.fixture
def bench() -> Bench:
    return Bench()


def listed(bench: Bench, version: int = 2, **filters: Any) -> dict[str, str]:
    response = bench.ask(list_transactions, ListTransactionsRequest(**filters), version)
    assert response.error_code == NONE
    return {state.transactional_id: state.transaction_state for state in response.transaction_states}


def all_states(bench: Bench) -> None:
    """One transactional id in each state that can last."""
    started(bench, "a-empty")
    opened(bench, "b-ongoing")
    opened(bench, "c-committed").commit()
    opened(bench, "d-aborted").abort()


@pytest.mark.parametrize("version", (0, 1, 2))
def test_all_are_listed_with_their_states(bench: Bench, version: int) -> None:
    all_states(bench)
    assert listed(bench, version) == {
        "a-empty": "Empty",
        "b-ongoing": "Ongoing",
        "c-committed": "CompleteCommit",
        "d-aborted": "CompleteAbort",
    }


def test_filters_by_state_and_says_which_it_does_not_know(bench: Bench) -> None:
    all_states(bench)
    assert set(listed(bench, 0, state_filters=["Ongoing", "CompleteAbort"])) == {"b-ongoing", "d-aborted"}
    request = ListTransactionsRequest(state_filters=["Ongoing", "Sleeping"])
    response = bench.ask(list_transactions, request, 0)
    assert response.unknown_state_filters == ["Sleeping"]
    assert [state.transactional_id for state in response.transaction_states] == ["b-ongoing"]
    nothing = bench.ask(list_transactions, ListTransactionsRequest(state_filters=["Sleeping"]), 0)
    assert nothing.transaction_states == []


def test_filters_by_producer_id(bench: Bench) -> None:
    all_states(bench)
    wanted = bench.transaction("c-committed").producer_id
    assert set(listed(bench, producer_id_filters=[wanted, 10**9])) == {"c-committed"}


def test_filters_by_how_long_they_are_open(bench: Bench) -> None:
    all_states(bench)
    bench.advance(1000)
    opened(bench, "younger")
    bench.advance(500)
    assert set(listed(bench, duration_filter=0)) == {"b-ongoing", "younger"}
    assert set(listed(bench, duration_filter=1000)) == {"b-ongoing"}
    assert listed(bench, duration_filter=2000) == {}
    assert len(listed(bench, duration_filter=-1)) == 5


def test_filters_by_a_pattern_for_the_whole_id(bench: Bench) -> None:
    all_states(bench)
    assert set(listed(bench, transactional_id_pattern="[bc]-.*")) == {"b-ongoing", "c-committed"}
    assert listed(bench, transactional_id_pattern="[bc]") == {}
    assert len(listed(bench, transactional_id_pattern=None)) == 4
    assert len(listed(bench, transactional_id_pattern="")) == 4
    refused = bench.ask(list_transactions, ListTransactionsRequest(transactional_id_pattern="(["), 2)
    assert refused.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


@pytest.mark.timeout(10)
def test_a_hostile_pattern_does_not_keep_the_broker_busy(bench: Bench) -> None:
    started(bench, "a" * 5000)
    assert listed(bench, transactional_id_pattern="(a+)+b") == {}
    assert len(listed(bench, transactional_id_pattern="(a|aa)+")) == 1


def test_filters_are_joined_by_and(bench: Bench) -> None:
    all_states(bench)
    assert listed(bench, state_filters=["Empty"], transactional_id_pattern="b.*") == {}


def test_a_transaction_is_described_with_its_partitions(bench: Bench) -> None:
    producer = opened(bench)
    write(producer, index=2)
    write(producer, index=1, topic=OTHER_TOPIC)
    started_ms = bench.wall_ms
    bench.advance(1234)
    request = DescribeTransactionsRequest(transactional_ids=["app", "nobody"])
    known, unknown = bench.ask(describe_transactions, request, 0).transaction_states
    assert (known.error_code, known.transactional_id, known.transaction_state) == (NONE, "app", "Ongoing")
    assert (known.producer_id, known.producer_epoch) == producer.identity
    assert (known.transaction_timeout_ms, known.transaction_start_time_ms) == (TIMEOUT_MS, started_ms)
    assert {topic.topic: topic.partitions for topic in known.topics} == {OTHER_TOPIC: [1], TOPIC: [0, 2]}
    assert unknown.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    bench.delete_topic(TOPIC)
    (known, _) = bench.ask(describe_transactions, request, 0).transaction_states
    assert [topic.topic for topic in known.topics] == [OTHER_TOPIC]
    producer.commit()
    (known, _) = bench.ask(describe_transactions, request, 0).transaction_states
    assert (known.transaction_state, known.transaction_start_time_ms, known.topics) == (
        "CompleteCommit",
        -1,
        [],
    )


def test_producers_of_a_partition_are_described(bench: Bench) -> None:
    one = opened(bench, "one")
    two = opened(bench, "two")
    two.commit()
    request = producers.DescribeProducersRequest(
        topics=[producers.TopicRequest(name=TOPIC, partition_indexes=[0, 1, 9])]
    )
    busy, idle, missing = bench.ask(describe_producers, request, 0).topics[0].partitions
    shown = {
        state.producer_id: (state.producer_epoch, state.last_sequence, state.current_txn_start_offset)
        for state in busy.active_producers
    }
    assert shown == {one.producer_id: (one.epoch, 0, 0), two.producer_id: (two.epoch, -1, -1)}
    assert [state.coordinator_epoch for state in busy.active_producers] == [-1, bench.leader_epoch]
    assert (idle.error_code, idle.active_producers) == (NONE, [])
    assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
