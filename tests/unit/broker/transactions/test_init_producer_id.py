"""InitProducerId: an identity for each producer, a fence against the one before."""

from __future__ import annotations

import logging

import pytest
from coordinator_cases import (
    FENCED,
    NONE,
    OLD_EPOCH,
    OTHER_TOPIC,
    TIMEOUT_MS,
    Bench,
    Producer,
    exhausted,
    opened,
    started,
    write,
)

from semel.broker.core import Limits
from semel.broker.transaction_messages import TransactionEnded, TransactionIdentified
from semel.broker.transactions.init_producer_id import init_producer_id
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode
from semel.wire.messages.init_producer_id import InitProducerIdRequest

VERSIONS = range(7)
NAMING_VERSIONS = range(3, 7)
"""The versions in which a producer can tell the identity that it has."""
MAX_TIMEOUT_MS = 900_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_idempotent_producer_gets_an_id_of_its_own(bench: Bench, version: int) -> None:
    ids = [bench.ask(init_producer_id, InitProducerIdRequest(), version) for _ in range(2500)]
    assert all((answer.error_code, answer.producer_epoch) == (NONE, 0) for answer in ids)
    assert len({answer.producer_id for answer in ids}) == 2500


def test_ids_are_never_given_again_after_a_restart(bench: Bench) -> None:
    given = []
    for n in range(6):
        given.append(started(bench, f"app-{n}").producer_id)
        given += [bench.ask(init_producer_id, InitProducerIdRequest(), 5).producer_id for _ in range(700)]
        bench.restart() if n % 2 else bench.restart_from_snapshot()
    assert len(set(given)) == len(given)


def test_an_identity_is_on_disk_before_it_is_told(bench: Bench) -> None:
    started(bench)
    assert bench.last_decision.sync
    started(bench)
    assert bench.last_decision.sync


@pytest.mark.parametrize("version", VERSIONS)
def test_the_next_instance_gets_the_next_epoch(bench: Bench, version: int) -> None:
    first = started(bench, version=version)
    second = started(bench, version=version)
    assert second.identity == (first.producer_id, first.epoch + 1)
    assert bench.state_of("app") is State.EMPTY


def test_an_abort_of_what_was_open_is_logged_and_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "semel.broker")
    old = opened(bench)
    assert Producer(bench).init().error_code == Producer(bench).init().error_code == NONE
    (record,) = caplog.records
    assert record.getMessage() == (
        "aborting the transaction of 'app': its id was initialized again, 1 partitions, "
        f"producer {old.producer_id} epoch {old.epoch}"
    )


@pytest.mark.parametrize("ends", (4, 5))
def test_an_open_transaction_is_aborted_in_the_same_group_and_the_epoch_raised_once(
    bench: Bench, ends: int
) -> None:
    old = opened(bench, version=ends)
    write(old, ends, 1, OTHER_TOPIC)
    groups = len(bench.groups)
    new = started(bench)
    assert len(bench.groups) == groups + 1
    assert [type(entry) for entry in bench.groups[-1][-2:]] == [TransactionEnded, TransactionIdentified]
    assert new.identity == (old.producer_id, old.epoch + 1)
    assert bench.state_of("app") is State.EMPTY
    for topic, index in (("orders", 0), (OTHER_TOPIC, 1)):
        (marker,) = bench.markers(topic, index)
        assert (marker.commit, marker.producer_epoch) == (False, new.epoch)
        assert bench.last_stable_offset(topic, index) == 2
    write(new, ends)
    assert new.end(True, ends).error_code == NONE


@pytest.mark.parametrize("version", NAMING_VERSIONS)
def test_a_producer_raises_its_own_epoch_by_naming_it(bench: Bench, version: int) -> None:
    producer = opened(bench)
    before = producer.identity
    assert producer.init(version, named=True).error_code == NONE
    assert producer.identity == (before[0], before[1] + 1)


@pytest.mark.parametrize("version", NAMING_VERSIONS)
def test_a_fenced_producer_cannot_come_back_by_naming_its_identity(bench: Bench, version: int) -> None:
    old = opened(bench)
    new = started(bench)
    expected = FENCED if version >= 4 else OLD_EPOCH
    assert old.twin().init(version, named=True).error_code == expected, "that would be the new one's identity"
    write(new)
    assert old.init(version, named=True).error_code == expected
    assert new.commit() == NONE
    assert old.init(version, named=True).error_code == expected
    ahead = new.twin()
    ahead.epoch += 1
    assert ahead.init(version, named=True).error_code == expected
    stranger = new.twin()
    stranger.producer_id += 500
    assert stranger.init(version, named=True).error_code == expected
    assert bench.transaction("app").epoch == new.epoch


@pytest.mark.parametrize("version", NAMING_VERSIONS)
def test_a_lost_answer_can_be_asked_for_again(bench: Bench, version: int) -> None:
    producer = opened(bench)
    retry = producer.twin()
    producer.init(version, named=True)
    journal = len(bench.journal)
    assert retry.init(version, named=True).error_code == NONE
    assert retry.identity == producer.identity
    assert len(bench.journal) == journal
    bench.restart()
    late = producer.twin()
    write(producer)
    # Now something has happened under the new identity: whoever has the old one is behind.
    late.epoch -= 1
    assert late.init(version, named=True).error_code == (FENCED if version >= 4 else OLD_EPOCH)
    assert bench.state_of("app") is State.ONGOING


@pytest.mark.parametrize("ends", (4, 5))
@pytest.mark.parametrize("version", NAMING_VERSIONS)
def test_a_producer_whose_time_ran_out_goes_on_with_a_raised_epoch(
    bench: Bench, version: int, ends: int
) -> None:
    producer = opened(bench, version=ends)
    before = producer.identity
    bench.advance(TIMEOUT_MS)
    assert producer.init(version, named=True).error_code == NONE
    assert producer.identity == (before[0], before[1] + 2)
    write(producer, ends)
    assert producer.end(True, ends).error_code == NONE
    assert [marker.commit for marker in bench.markers()] == [False, True]


def test_naming_the_identity_before_a_version_2_end_is_accepted(bench: Bench) -> None:
    producer = opened(bench)
    producer.end(True, take=False)
    assert producer.init(named=True).error_code == NONE
    assert bench.markers()[-1].commit


def test_an_id_that_was_forgotten_gets_a_new_producer_id(bench: Bench) -> None:
    producer = opened(bench)
    producer.commit()
    bench.wall_ms += bench.limits.transactional_id_expiration_ms + 1
    bench.forget_idle()
    assert "app" not in bench.broker.transactions.by_id
    assert producer.commit() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    old_id = producer.producer_id
    assert producer.init(named=True).error_code == NONE
    assert producer.producer_id != old_id and producer.epoch == 0
    write(producer)
    assert producer.commit() == NONE


@pytest.mark.parametrize("version", NAMING_VERSIONS)
def test_the_last_epoch_rolls_to_a_new_producer_id(bench: Bench, version: int) -> None:
    producer = exhausted(bench)
    write(producer)
    old = producer.twin()
    assert producer.init(version, named=True).error_code == NONE
    assert producer.producer_id != old.producer_id and producer.epoch == 0
    (marker,) = bench.markers()
    assert (marker.producer_id, marker.producer_epoch, marker.commit) == (old.producer_id, 32_767, False)
    retry = old.twin()
    assert retry.init(version, named=True).error_code == NONE
    assert retry.identity == producer.identity
    assert old.produce(sequence=1) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    # Not even a batch that hides its transaction passes where the old id has written.
    assert old.produce(sequence=1, transactional=False) == OLD_EPOCH


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("timeout_ms", (-(2**31), -1, 0, MAX_TIMEOUT_MS + 1, 2**31 - 1))
def test_a_timeout_out_of_bounds_is_refused(bench: Bench, version: int, timeout_ms: int) -> None:
    answer = Producer(bench).init(version, transaction_timeout_ms=timeout_ms)
    assert answer.error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert (answer.producer_id, answer.producer_epoch) == (-1, -1)
    assert "app" not in bench.broker.transactions.by_id


@pytest.mark.parametrize("timeout_ms", (1, MAX_TIMEOUT_MS))
def test_a_timeout_at_the_bounds_is_taken(bench: Bench, timeout_ms: int) -> None:
    assert Producer(bench).init(transaction_timeout_ms=timeout_ms).error_code == NONE
    assert bench.transaction("app").timeout_ms == timeout_ms


def test_an_empty_transactional_id_and_half_an_identity_are_refused(bench: Bench) -> None:
    assert Producer(bench, "").init().error_code == ErrorCode.INVALID_REQUEST
    assert Producer(bench).init(producer_id=5).error_code == ErrorCode.INVALID_REQUEST
    assert Producer(bench).init(producer_epoch=5).error_code == ErrorCode.INVALID_REQUEST
    assert not bench.broker.transactions.by_id


def test_the_limit_of_open_transactions_is_each_principal_s_own() -> None:
    bench = Bench(Limits(max_open_transactions=2))
    producers = [started(bench, f"app-{n}") for n in range(3)]
    assert [producer.produce() for producer in producers] == [NONE, NONE, ErrorCode.POLICY_VIOLATION]
    bob = Producer(bench, "bob", "User:bob")
    bob.init()
    assert bob.produce() == NONE
    bench.restart()
    assert producers[2].produce() == ErrorCode.POLICY_VIOLATION
    assert producers[2].add() == ErrorCode.POLICY_VIOLATION
    assert producers[2].add_group() == ErrorCode.POLICY_VIOLATION
    assert producers[2].commit_offset(1) == ErrorCode.POLICY_VIOLATION
    assert producers[0].commit() == NONE
    assert producers[2].produce() == NONE


def test_there_are_no_more_transactional_ids_than_the_limit_allows(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Limits(max_transactional_ids=2))
    first, second = (started(bench, f"app-{n}") for n in range(2))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert Producer(bench, "one-too-many").init().error_code == ErrorCode.POLICY_VIOLATION
    assert caplog.text.count("refused by max.transactional.ids: there are 2 transactional ids") == 1
    assert "'one-too-many'" in caplog.text
    # Those that are known go on, and so does whoever needs no transactional id.
    assert first.init().error_code == NONE
    assert second.produce() == NONE
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=TIMEOUT_MS)
    assert bench.ask(init_producer_id, request, 5).error_code == NONE
    assert second.commit() == NONE
    bench.restart()
    assert Producer(bench, "one-too-many").init().error_code == ErrorCode.POLICY_VIOLATION
    bench.wall_ms += bench.limits.transactional_id_expiration_ms + 1
    bench.forget_idle()
    assert Producer(bench, "one-too-many").init().error_code == NONE
