"""KIP-939: a prepared transaction waits for its decision, over any restart, and only for that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from coordinator_cases import (
    ABORTABLE,
    BAD_STATE,
    FENCED,
    NONE,
    OLD_EPOCH,
    TIMEOUT_MS,
    Bench,
    Producer,
    exhausted,
    opened,
    state,
    write,
)

from semel.broker.core import Limits
from semel.broker.transactions.describing import NO_TIMEOUT_MS, describe_transactions
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_transactions import DescribeTransactionsRequest

YEAR_MS = 365 * 24 * 60 * 60 * 1000
RETENTION_MS = 7 * 24 * 60 * 60 * 1000
RESTARTS: tuple[Callable[[Bench], None], ...] = (
    lambda bench: None,
    Bench.restart,
    Bench.restart_from_snapshot,
)


@pytest.fixture
def bench() -> Bench:
    return Bench(Limits(two_phase_commit=True))


def prepared(bench: Bench) -> Producer:
    """A producer whose transaction is flushed and waits for the other half."""
    producer = Producer(bench)
    assert producer.init(6, enable_2pc=True, transaction_timeout_ms=0).error_code == NONE
    write(producer)
    write(producer, index=1)
    producer.commit_offset(5)
    return producer


def resume(bench: Bench) -> tuple[Producer, tuple[int, int]]:
    """The client after its restart: its new identity, and the one that the open transaction has."""
    producer = Producer(bench)
    answer = producer.init(6, enable_2pc=True, keep_prepared_txn=True)
    assert answer.error_code == NONE
    return producer, (answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch)


def test_where_it_is_not_enabled_nobody_can_probe_it() -> None:
    bench = Bench()
    for fields in ({"enable_2pc": True}, {"enable_2pc": True, "keep_prepared_txn": True}):
        answer = Producer(bench).init(6, **fields)
        assert answer.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert not bench.broker.transactions.by_id


def test_keeping_needs_the_right_to_prepare(bench: Bench) -> None:
    answer = Producer(bench).init(6, keep_prepared_txn=True)
    assert answer.error_code == ErrorCode.INVALID_REQUEST


def test_it_has_no_timeout(bench: Bench) -> None:
    prepared(bench)
    bench.advance(YEAR_MS)
    assert bench.state_of("app") is State.ONGOING
    bench.restart()
    bench.advance(YEAR_MS)
    assert bench.state_of("app") is State.ONGOING


def test_its_offsets_outlive_the_retention_of_offsets(bench: Bench) -> None:
    bench.commit_offset(1)
    prepared(bench)
    for _ in range(10):
        bench.advance(RETENTION_MS // 4)
    assert bench.offset(stable=True) == ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert bench.offset() == 1, "the committed one may not expire while a transaction is about to move it"
    new, _ = resume(bench)
    assert new.commit() == NONE
    assert bench.offset(stable=True) == 5


def test_it_is_shown_as_such(bench: Bench) -> None:
    prepared(bench)
    (shown,) = bench.ask(
        describe_transactions, DescribeTransactionsRequest(transactional_ids=["app"]), 0
    ).transaction_states
    assert (shown.transaction_state, shown.transaction_timeout_ms) == ("Ongoing", NO_TIMEOUT_MS)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("version", (3, 4, 5))
@pytest.mark.parametrize("commit", (True, False))
def test_the_client_decides_after_its_restart_with_the_new_identity(
    bench: Bench, restart: Callable[[Bench], None], version: int, commit: bool
) -> None:
    old = prepared(bench)
    restart(bench)
    new, ongoing = resume(bench)
    assert ongoing == old.identity
    assert new.identity == (old.producer_id, old.epoch + 1)
    restart(bench)
    assert new.end(commit, version).error_code == NONE
    assert bench.state_of("app") is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT)
    for index in (0, 1):
        (marker,) = bench.markers(index=index)
        assert (marker.producer_id, marker.commit) == (old.producer_id, commit)
        assert marker.producer_epoch > old.epoch
        assert bench.last_stable_offset(index=index) == 2
    assert bench.offset(stable=True) == (5 if commit else -1)
    write(new, version)
    assert new.end(True, version).error_code == NONE


@pytest.mark.parametrize("restart", RESTARTS)
def test_until_then_only_its_end_is_accepted(bench: Bench, restart: Callable[[Bench], None]) -> None:
    prepared(bench)
    new, _ = resume(bench)
    restart(bench)
    journal = len(bench.journal)
    assert new.produce(sequence=0) == ABORTABLE
    assert new.produce(2, version=9) == BAD_STATE
    assert new.add(2) == BAD_STATE
    assert new.add(2, version=5) == ABORTABLE
    assert new.add_group("another") == BAD_STATE
    assert new.commit_offset(9) == ABORTABLE
    assert new.commit_offset(9, version=3) == BAD_STATE
    assert len(bench.journal) == journal
    assert new.commit() == NONE


@pytest.mark.parametrize(
    ("ask", "versions", "abortable_since"),
    (
        (partial(Producer.produce, index=2, sequence=0), range(3, 14), 11),
        (partial(Producer.add, index=2), range(6), 5),
        (partial(Producer.add_group, group="another"), range(5), 4),
        (partial(Producer.commit_offset, offset=9), range(6), 4),
    ),
    ids=("Produce", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit"),
)
def test_the_refusal_is_in_the_words_of_each_version(
    bench: Bench, ask: Callable[..., int], versions: range, abortable_since: int
) -> None:
    prepared(bench)
    new, _ = resume(bench)
    answers = {version: ask(new, version=version) for version in versions}
    assert answers == {
        version: ABORTABLE if version >= abortable_since else BAD_STATE for version in versions
    }


@pytest.mark.parametrize("version", (1, 2, 5))
def test_the_old_process_is_fenced(bench: Bench, version: int) -> None:
    old = prepared(bench)
    resume(bench)
    assert old.end(True, version).error_code == (FENCED if version >= 2 else OLD_EPOCH)
    assert old.produce() == OLD_EPOCH
    assert old.produce(2, transactional=False, named=False) == OLD_EPOCH
    assert old.commit_offset(9) == OLD_EPOCH
    assert old.init(named=True).error_code == FENCED
    assert bench.state_of("app") is State.ONGOING


def test_resuming_twice_tells_the_same_ongoing_identity(bench: Bench) -> None:
    old = prepared(bench)
    first, _ = resume(bench)
    second, ongoing = resume(bench)
    assert ongoing == old.identity
    assert second.epoch == first.epoch + 1
    assert first.end(True).error_code == FENCED
    assert second.end(True).error_code == NONE


def test_resuming_without_anything_open_tells_so(bench: Bench) -> None:
    _, ongoing = resume(bench)
    assert ongoing == (-1, -1)
    producer, _ = resume(bench)
    write(producer)
    producer.commit()
    _, ongoing = resume(bench)
    assert ongoing == (-1, -1)


def test_without_keeping_it_is_aborted(bench: Bench) -> None:
    prepared(bench)
    new = Producer(bench)
    assert new.init(6, enable_2pc=True).error_code == NONE
    assert bench.state_of("app") is State.EMPTY
    assert not bench.markers()[-1].commit
    assert bench.offset(stable=True) == -1


def test_a_kept_one_is_aborted_by_an_instance_that_does_not_keep_it(bench: Bench) -> None:
    prepared(bench)
    kept, _ = resume(bench)
    assert Producer(bench).init(5).error_code == NONE
    assert kept.end(True).error_code == FENCED
    assert [marker.commit for marker in bench.markers()] == [False]


def test_a_transaction_that_was_not_two_phase_is_not_kept(bench: Bench) -> None:
    opened(bench)
    _, ongoing = resume(bench)
    assert ongoing == (-1, -1)
    assert not bench.markers()[-1].commit


def test_it_is_kept_when_epochs_run_out(bench: Bench) -> None:
    producer = exhausted(bench)
    bench.transaction("app").two_phase = True
    write(producer)
    new, ongoing = resume(bench)
    assert ongoing == (producer.producer_id, 32_766)
    assert new.producer_id != producer.producer_id and new.epoch == 0
    bench.broker = bench.loaded(bytes(part) for part in bench.snapshot_parts())
    assert new.produce() == ABORTABLE
    assert new.end(True).error_code == NONE
    (marker,) = bench.markers()
    assert (marker.producer_id, marker.producer_epoch) == (producer.producer_id, 32_767)
    assert bench.partition().log.open_transactions == {}
    assert producer.produce(2, sequence=0) == ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_a_snapshot_holds_both_identities(bench: Bench) -> None:
    prepared(bench)
    resume(bench)
    before = state(bench.broker)
    assert state(bench.loaded(bytes(part) for part in bench.snapshot_parts())) == before
    assert state(bench.replayed()) == before
    bench.advance(TIMEOUT_MS)
    assert bench.transaction("app").is_kept
