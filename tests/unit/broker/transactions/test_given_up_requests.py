"""What arrives by a connection that its producer of version 1 has left begins nothing and ends nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator_cases import BAD_STATE, GROUP, NONE, Bench, Producer, opened, started, write

from semel.broker.transactions.hearing import MAX_OLDER, Heard
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode

AGAIN = ErrorCode.CONCURRENT_TRANSACTIONS
OFFSETS_AGAIN = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
OLD_ENDS = (0, 3, 4)
"""Versions of EndTxn that do not raise the epoch."""


@pytest.fixture
def bench() -> Bench:
    return Bench()


def on(producer: Producer, connection: int) -> Producer:
    """The same producer, as it is heard by another of its connections."""
    other = producer.twin()
    other.connection = connection
    return other


def in_its_second_transaction(bench: Bench, version: int) -> Producer:
    """It gave up waiting for the end of its first one, sent that again by connection 2, and went on there."""
    producer = opened(bench, version=version)
    producer = on(producer, 2)
    assert producer.commit(version) == NONE
    write(producer, version)
    return producer


@pytest.mark.parametrize("commit", (True, False))
@pytest.mark.parametrize("version", OLD_ENDS)
def test_the_end_of_the_last_transaction_does_not_end_this_one(
    bench: Bench, version: int, commit: bool
) -> None:
    producer = in_its_second_transaction(bench, version)
    given_up = on(producer, 1)
    assert given_up.end(commit, version).error_code == AGAIN
    assert bench.state_of("app") is State.ONGOING
    write(producer, version, index=1)
    assert producer.commit(version) == NONE
    assert len(bench.markers()) == 2
    assert [marker.commit for marker in bench.markers(index=1)] == [True]


@pytest.mark.parametrize("version", OLD_ENDS)
def test_a_producer_with_several_connections_asks_again_and_is_heard(bench: Bench, version: int) -> None:
    producer = in_its_second_transaction(bench, version)
    other = on(producer, 1)
    assert other.commit(version) == AGAIN
    assert other.commit(version) == NONE
    write(producer, version)
    assert other.commit(version) == AGAIN, "each transaction is spoken for anew"
    assert other.commit(version) == NONE


def test_a_connection_that_added_to_the_transaction_may_end_it(bench: Bench) -> None:
    producer = in_its_second_transaction(bench, 3)
    other = on(producer, 1)
    assert other.add(1) == NONE
    assert other.commit(3) == NONE


@pytest.mark.parametrize("connections", ((1, 1, 1), (1, 2, 3), (7, 7, 8)))
def test_a_producer_with_one_connection_at_a_time_never_has_to_ask_again(
    bench: Bench, connections: tuple[int, int, int]
) -> None:
    producer = started(bench)
    for n in range(3):
        first, second, third = (on(producer, connection + 10 * n) for connection in connections)
        assert first.add() == NONE
        assert second.add_group() == NONE
        assert third.commit(3) == NONE


@pytest.mark.parametrize("join", (Producer.add, Producer.add_group), ids=("partition", "group"))
def test_what_joined_the_last_transaction_does_not_begin_another(
    bench: Bench, join: Callable[[Producer], int]
) -> None:
    producer = on(opened(bench, version=3), 2)
    assert producer.commit(3) == NONE
    given_up = on(producer, 1)
    assert join(given_up) == AGAIN
    assert bench.state_of("app") is State.COMPLETE_COMMIT
    assert join(given_up) == NONE, "somebody is there, and asks again"


def test_offsets_of_the_last_transaction_do_not_become_those_of_this_one(bench: Bench) -> None:
    producer = on(started(bench), 2)
    for offset in (10, 20):
        assert producer.add_group() == NONE
        assert producer.commit_offset(offset, version=3) == NONE
        if offset == 20:
            given_up = on(producer, 1)
            assert given_up.commit_offset(99, version=3) == OFFSETS_AGAIN
        assert producer.commit(3) == NONE
    assert bench.offset(group=GROUP) == 20


def test_offsets_may_always_come_by_another_connection_than_the_rest(bench: Bench) -> None:
    coordinating = on(started(bench), 2)
    for n in range(3):
        assert coordinating.add_group() == NONE
        assert on(coordinating, 1).commit_offset(n, version=3) == NONE
        assert coordinating.commit(3) == NONE


def test_a_retry_of_what_is_done_is_answered_by_any_connection(bench: Bench) -> None:
    producer = on(opened(bench, version=3), 2)
    assert producer.commit(3) == NONE
    given_up = on(producer, 1)
    assert given_up.commit(3) == NONE
    assert given_up.abort(3) == BAD_STATE


def test_a_new_identity_is_heard_by_any_connection(bench: Bench) -> None:
    in_its_second_transaction(bench, 3)
    successor = Producer(bench)
    successor.connection = 1
    assert successor.init().error_code == NONE
    write(successor, 3)
    assert successor.commit(3) == NONE


def test_version_2_needs_none_of_it(bench: Bench) -> None:
    producer = on(opened(bench), 2)
    assert producer.commit() == NONE
    write(producer)
    assert on(producer, 1).commit() == NONE
    assert not bench.broker.hearing.coordination._newest


def test_ids_that_are_forgotten_leave_nothing_behind(bench: Bench) -> None:
    producer = in_its_second_transaction(bench, 3)
    assert on(producer, 1).commit(3) == AGAIN
    assert producer.commit(3) == NONE
    bench.wall_ms += bench.limits.transactional_id_expiration_ms + 1
    bench.forget_idle()
    heard = bench.broker.hearing.coordination
    assert not heard._newest
    assert not heard._older


def test_no_more_connections_are_remembered_than_the_limit_says() -> None:
    heard = Heard()
    heard.hear("app", 1000)
    for connection in range(1, 900):
        heard.hear("app", connection)
    assert len(heard._older["app"]) <= MAX_OLDER
