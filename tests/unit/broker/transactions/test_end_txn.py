"""EndTxn: one group ends a transaction, a retry gets the first answer, nobody else can end it."""

from __future__ import annotations

import pytest
from coordinator_cases import (
    ABORTABLE,
    BAD_MAPPING,
    BAD_STATE,
    FENCED,
    NONE,
    OLD_EPOCH,
    OTHER_TOPIC,
    TIMEOUT_MS,
    TOPIC,
    Bench,
    Producer,
    exhausted,
    opened,
    started,
    write,
)

from semel.broker.entries import Append
from semel.broker.group_messages import TxnOffsetsEnded
from semel.broker.transaction_messages import TransactionEnded
from semel.broker.transactions.state import ALLOWED_FROM, State, Transaction

VERSIONS = range(6)
OUTCOMES = (True, False)
V1 = 4
V2 = 5


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("commit", OUTCOMES)
def test_markers_offsets_and_state_are_one_journal_group(bench: Bench, version: int, commit: bool) -> None:
    producer = opened(bench, version=version)
    write(producer, version, 2)
    write(producer, version, 1, OTHER_TOPIC)
    assert producer.add_group() == NONE
    assert producer.commit_offset(7, version=3) == NONE
    groups_before = len(bench.groups)
    assert producer.end(commit, version).error_code == NONE
    assert len(bench.groups) == groups_before + 1
    ended = bench.groups[-1]
    markers = [entry for entry in ended if isinstance(entry, Append)]
    assert all(marker.header.is_control for marker in markers)
    assert [marker.index for marker in markers] == [0, 2, 1]
    assert [type(entry) for entry in ended[3:]] == [TxnOffsetsEnded, TransactionEnded]
    assert bench.state_of("app") is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT)
    for topic, index in ((TOPIC, 0), (TOPIC, 2), (OTHER_TOPIC, 1)):
        (marker,) = bench.markers(topic, index)
        assert marker.commit is commit
        assert bench.last_stable_offset(topic, index) == 2
    assert bench.offset() == (7 if commit else -1)


@pytest.mark.parametrize("version", VERSIONS)
def test_only_version_2_raises_the_epoch_and_tells(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    before = producer.identity
    response = producer.end(True, version)
    (marker,) = bench.markers()
    if version >= V2:
        assert (response.producer_id, response.producer_epoch) == (before[0], before[1] + 1)
        assert marker.producer_epoch == before[1] + 1
    else:
        assert bench.transaction("app").epoch == before[1]
        assert marker.producer_epoch == before[1]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("commit", OUTCOMES)
def test_a_retry_gets_the_same_answer_and_writes_nothing(bench: Bench, version: int, commit: bool) -> None:
    producer = opened(bench, version=version)
    first = producer.end(commit, version, take=False)
    journal = len(bench.journal)
    again = producer.end(commit, version, take=False)
    assert (again.error_code, again.producer_id, again.producer_epoch) == (
        NONE,
        first.producer_id,
        first.producer_epoch,
    )
    bench.restart()
    assert producer.end(commit, version, take=False).producer_epoch == first.producer_epoch
    assert len(bench.journal) == journal


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("commit", OUTCOMES)
def test_a_retry_with_the_other_outcome_is_refused(bench: Bench, version: int, commit: bool) -> None:
    producer = opened(bench, version=version)
    producer.end(commit, version, take=False)
    assert producer.end(not commit, version, take=False).error_code == BAD_STATE
    assert bench.state_of("app") is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT)


@pytest.mark.parametrize("commit", OUTCOMES)
def test_a_delayed_end_of_version_2_cannot_end_the_next_transaction(bench: Bench, commit: bool) -> None:
    producer = opened(bench)
    late = producer.twin()
    assert producer.commit() == NONE
    write(producer)
    assert late.end(commit).error_code == FENCED
    assert bench.state_of("app") is State.ONGOING


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_epoch_is_fenced_in_the_words_of_its_version(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    newer = Producer(bench)
    newer.init()
    expected = FENCED if version >= 2 else OLD_EPOCH
    for commit in OUTCOMES:
        assert producer.end(commit, version).error_code == expected
    producer.epoch = newer.epoch + 1
    assert producer.end(True, version).error_code == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_id_and_a_foreign_producer_are_told_so(bench: Bench, version: int) -> None:
    stranger = Producer(bench, "stranger")
    stranger.take(1, 0)
    assert stranger.end(True, version).error_code == BAD_MAPPING
    producer = opened(bench, version=version)
    producer.producer_id += 1000
    assert producer.end(True, version).error_code == BAD_MAPPING


@pytest.mark.parametrize("version", range(V2))
def test_ending_nothing_is_an_error_for_version_1(bench: Bench, version: int) -> None:
    producer = started(bench)
    for commit in OUTCOMES:
        assert producer.end(commit, version).error_code == BAD_STATE
    assert bench.state_of("app") is State.EMPTY


def test_committing_nothing_is_an_error_for_version_2_and_leaves_no_trace(bench: Bench) -> None:
    producer = started(bench)
    journal = len(bench.journal)
    assert producer.commit() == BAD_STATE
    assert len(bench.journal) == journal
    write(producer)
    assert producer.commit() == NONE
    # The same again, with the new epoch, is no retry: nothing was added.
    assert producer.commit() == BAD_STATE
    write(producer)
    assert producer.abort() == NONE
    assert producer.commit() == BAD_STATE


@pytest.mark.parametrize("before", ("empty", "commit", "abort"))
def test_aborting_nothing_raises_the_epoch_for_version_2(bench: Bench, before: str) -> None:
    producer = started(bench)
    if before != "empty":
        write(producer)
        producer.end(before == "commit")
    offsets = bench.partition().log.end_offset
    epoch = producer.epoch
    first = producer.end(False, take=False)
    again = producer.end(False, take=False)
    assert (first.error_code, first.producer_epoch) == (NONE, epoch + 1)
    assert (again.error_code, again.producer_epoch) == (NONE, epoch + 1)
    assert bench.partition().log.end_offset == offsets
    producer.take(first.producer_id, first.producer_epoch)
    write(producer)
    assert producer.commit() == NONE


def test_the_last_epoch_rolls_to_a_new_producer_id(bench: Bench) -> None:
    producer = exhausted(bench)
    old = producer.identity
    write(producer)
    first = producer.end(True, take=False)
    assert first.error_code == NONE
    assert first.producer_id != old[0] and first.producer_epoch == 0
    (marker,) = bench.markers()
    assert (marker.producer_id, marker.producer_epoch) == (old[0], 32_767)
    assert bench.last_stable_offset() == 2
    again = producer.end(True, take=False)
    assert (again.producer_id, again.producer_epoch) == (first.producer_id, 0)
    assert producer.end(False, take=False).error_code == BAD_STATE
    late = producer.twin()
    producer.take(first.producer_id, first.producer_epoch)
    write(producer)
    assert producer.commit() == NONE
    assert late.produce(sequence=1) == BAD_MAPPING
    assert late.end(True).error_code in (BAD_MAPPING, FENCED)


def test_aborting_nothing_at_the_last_epoch_rolls_too(bench: Bench) -> None:
    producer = exhausted(bench)
    first = producer.end(False, take=False)
    again = producer.end(False, take=False)
    assert (first.error_code, first.producer_epoch) == (NONE, 0)
    assert (again.error_code, again.producer_id, again.producer_epoch) == (NONE, first.producer_id, 0)


def test_a_new_producer_id_is_on_disk_before_it_is_told(bench: Bench) -> None:
    producer = exhausted(bench)
    # Whatever the durability: the block that the id is from must be reserved first.
    bench.broker.producer_ids.skip_given()
    write(producer)
    assert producer.commit() == NONE
    assert bench.last_decision.sync


@pytest.mark.parametrize("version", VERSIONS)
def test_an_end_after_the_timeout_is_told_so(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    bench.advance(TIMEOUT_MS)
    assert bench.state_of("app") is State.COMPLETE_ABORT
    commit = producer.end(True, version, take=False)
    abort = producer.end(False, version, take=False)
    if version >= V2:
        # The client aborts in its turn, and goes on with the raised epoch.
        assert commit.error_code == ABORTABLE
        assert (abort.error_code, abort.producer_epoch) == (NONE, producer.epoch + 1)
        producer.take(abort.producer_id, abort.producer_epoch)
        write(producer)
        assert producer.commit() == NONE
    else:
        expected = FENCED if version >= 2 else OLD_EPOCH
        assert (commit.error_code, abort.error_code) == (expected, expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_retry_after_init_producer_id_is_fenced(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    late = producer.twin()
    assert producer.end(True, version).error_code == NONE
    assert Producer(bench).init().error_code == NONE
    assert late.end(True, version).error_code == (FENCED if version >= 2 else OLD_EPOCH)


def test_version_1_keeps_its_epoch_from_one_transaction_to_the_next(bench: Bench) -> None:
    producer = started(bench)
    for n in range(5):
        write(producer, V1)
        assert producer.end(n % 2 == 0, V1).error_code == NONE
    assert [marker.commit for marker in bench.markers()] == [True, False, True, False, True]
    assert len({marker.producer_epoch for marker in bench.markers()}) == 1


def test_a_group_that_was_only_named_leaves_nothing_behind(bench: Bench) -> None:
    producer = started(bench)
    assert producer.add_group("ghost") == NONE
    assert producer.commit(V1) == NONE
    assert "ghost" not in bench.broker.groups.by_id


def test_a_topic_deleted_meanwhile_is_skipped_and_its_successor_gets_no_marker(bench: Bench) -> None:
    producer = opened(bench)
    write(producer, index=1, topic=OTHER_TOPIC)
    bench.delete_topic(TOPIC)
    bench.create_topic(TOPIC)
    assert producer.commit() == NONE
    assert bench.markers(TOPIC) == []
    assert bench.partition(TOPIC).log.end_offset == 0
    assert len(bench.markers(OTHER_TOPIC, 1)) == 1


@pytest.mark.parametrize("version", (V1, V2))
def test_a_topic_made_anew_takes_part_as_another_one(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    bench.delete_topic(TOPIC)
    bench.create_topic(TOPIC)
    producer.sequences = {}
    if version == V1:
        assert producer.produce(version=9) == BAD_STATE
        assert producer.produce(version=11) == ABORTABLE
    write(producer, version)
    assert producer.end(True, version).error_code == NONE
    assert len(bench.markers(TOPIC)) == 1
    assert bench.last_stable_offset(TOPIC) == 2


@pytest.mark.parametrize("to", State)
@pytest.mark.parametrize("at", State)
def test_no_transition_is_possible_but_those_of_the_table(at: State, to: State) -> None:
    transaction = Transaction("app")
    transaction.state = at
    if at in ALLOWED_FROM[to]:
        transaction.move_to(to)
        assert transaction.state is to
    else:
        with pytest.raises(AssertionError):
            transaction.move_to(to)
        assert transaction.state is at


def test_a_decided_commit_never_becomes_an_abort() -> None:
    assert not {State.PREPARE_COMMIT, State.COMPLETE_COMMIT} & ALLOWED_FROM[State.PREPARE_EPOCH_FENCE]
    assert State.PREPARE_COMMIT not in ALLOWED_FROM[State.PREPARE_ABORT]
    assert ALLOWED_FROM[State.COMPLETE_COMMIT] == {State.PREPARE_COMMIT}
    assert all(State.DEAD not in sources for sources in ALLOWED_FROM.values())
