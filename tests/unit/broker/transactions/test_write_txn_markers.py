"""WriteTxnMarkers: an operator ends what hangs, and can never tear a transaction."""

from __future__ import annotations

import logging

import pytest
from coordinator_cases import (
    BAD_STATE,
    FENCED,
    NONE,
    OLD_EPOCH,
    OTHER_TOPIC,
    TOPIC,
    Bench,
    Producer,
    exhausted,
    opened,
    started,
    write,
)

from semel.broker.decision import Decision
from semel.broker.transaction_messages import TransactionForgotten
from semel.broker.transactions.markers import write_txn_markers
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode
from semel.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)

VERSIONS = (1, 2)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def marker(
    producer_id: int,
    epoch: int,
    where: dict[str, list[int]],
    *,
    commit: bool = False,
    transaction_version: int = 0,
) -> WritableTxnMarker:
    return WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=commit,
        coordinator_epoch=0,
        transaction_version=transaction_version,
        topics=[
            WritableTxnMarkerTopic(name=name, partition_indexes=indexes) for name, indexes in where.items()
        ],
    )


def ask(bench: Bench, *markers: WritableTxnMarker, version: int = 2) -> list[int]:
    """The error code of every partition, in order."""
    response = bench.ask(write_txn_markers, WriteTxnMarkersRequest(markers=list(markers)), version)
    return [
        part.error_code for result in response.markers for topic in result.topics for part in topic.partitions
    ]


def hanging(bench: Bench) -> Producer:
    """An open transaction that no coordinator knows."""
    producer = opened(bench)
    transaction = bench.transaction("app")
    transaction.state = State.EMPTY
    bench.submit(Decision(None, [TransactionForgotten(transactional_id="app")]))
    assert bench.last_stable_offset() == 0
    return producer


@pytest.mark.parametrize("version", VERSIONS)
def test_one_that_the_coordinator_has_open_is_aborted_as_a_whole(bench: Bench, version: int) -> None:
    producer = opened(bench)
    write(producer, index=2)
    write(producer, index=1, topic=OTHER_TOPIC)
    producer.commit_offset(5)
    groups = len(bench.groups)
    assert ask(bench, marker(producer.producer_id, producer.epoch, {TOPIC: [0]}), version=version) == [NONE]
    assert len(bench.groups) == groups + 1
    assert bench.state_of("app") is State.COMPLETE_ABORT
    for topic, index in ((TOPIC, 0), (TOPIC, 2), (OTHER_TOPIC, 1)):
        (written,) = bench.markers(topic, index)
        assert (written.commit, written.producer_epoch) == (False, producer.epoch + 1)
        assert bench.last_stable_offset(topic, index) == 2
    assert bench.offset(stable=True) == -1


def test_what_an_operator_ends_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel.broker")
    gone = hanging(bench)
    assert ask(bench, marker(*gone.identity, {TOPIC: [0]})) == [NONE]
    known = opened(bench, "known")
    assert ask(bench, marker(*known.identity, {TOPIC: [0]})) == [NONE]
    by_hand, whole = (record.getMessage() for record in caplog.records)
    assert by_hand == (
        f"writing the abort marker that was asked for (WriteTxnMarkers) to {TOPIC}-0: "
        f"producer {gone.producer_id} epoch {gone.epoch}"
    )
    assert whole == (
        "aborting the transaction of 'known': a marker was asked for (WriteTxnMarkers), 1 partitions, "
        f"producer {known.producer_id} epoch {known.epoch}"
    )


def test_naming_several_of_its_partitions_aborts_it_once(bench: Bench) -> None:
    producer = opened(bench)
    write(producer, index=2)
    assert ask(bench, marker(*producer.identity, {TOPIC: [0, 2]})) == [NONE, NONE]
    assert len(bench.markers()) == len(bench.markers(index=2)) == 1


@pytest.mark.parametrize("ends", (2, 4, 5))
def test_its_producer_cannot_commit_afterwards(bench: Bench, ends: int) -> None:
    producer = opened(bench, version=ends)
    ask(bench, marker(producer.producer_id, producer.epoch, {TOPIC: [0]}))
    code = producer.end(True, ends).error_code
    assert code == (ErrorCode.TRANSACTION_ABORTABLE if ends == 5 else FENCED)
    assert producer.produce() == OLD_EPOCH
    assert [written.commit for written in bench.markers()] == [False]


@pytest.mark.parametrize("version", VERSIONS)
def test_nobody_commits_it_by_hand(bench: Bench, version: int) -> None:
    producer = opened(bench)
    wanted = marker(producer.producer_id, producer.epoch, {TOPIC: [0, 1]}, commit=True)
    assert ask(bench, wanted, version=version) == [BAD_STATE, BAD_STATE]
    assert bench.state_of("app") is State.ONGOING
    assert bench.partition().log.end_offset == 1
    assert producer.commit() == NONE


@pytest.mark.parametrize("commit", (True, False))
def test_one_that_no_coordinator_knows_gets_the_marker_asked_for(bench: Bench, commit: bool) -> None:
    producer = hanging(bench)
    wanted = marker(producer.producer_id, producer.epoch, {TOPIC: [0]}, commit=commit)
    assert ask(bench, wanted) == [NONE]
    (written,) = bench.markers()
    assert (written.commit, written.producer_epoch) == (commit, producer.epoch)
    assert bench.last_stable_offset() == 2


def test_the_epoch_must_be_greater_under_version_2_and_not_less_before(bench: Bench) -> None:
    producer = hanging(bench)
    producer_id, epoch = producer.identity
    stale = marker(producer_id, epoch - 1, {TOPIC: [0]})
    same_in_2 = marker(producer_id, epoch, {TOPIC: [0]}, transaction_version=2)
    assert ask(bench, stale) == ask(bench, same_in_2) == [OLD_EPOCH]
    assert bench.partition().log.end_offset == 1
    assert ask(bench, marker(producer_id, epoch + 1, {TOPIC: [0]}, transaction_version=2)) == [NONE]
    # The late batch is refused by the partition itself: no coordinator knows the producer.
    assert producer.produce(transactional=False, named=False) == OLD_EPOCH


def test_a_version_1_request_cannot_say_version_2(bench: Bench) -> None:
    producer = hanging(bench)
    assert ask(bench, marker(*producer.identity, {TOPIC: [0]}), version=1) == [NONE]


def test_the_epoch_counts_for_one_that_the_coordinator_has_open_too(bench: Bench) -> None:
    opened(bench)
    producer = started(bench)
    write(producer)
    assert ask(bench, marker(producer.producer_id, producer.epoch - 1, {TOPIC: [0]})) == [OLD_EPOCH]
    assert bench.state_of("app") is State.ONGOING


def test_a_partition_that_does_not_exist_is_told_so(bench: Bench) -> None:
    producer = hanging(bench)
    wanted = marker(*producer.identity, {TOPIC: [0, 8], "no-such": [0]})
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert ask(bench, wanted) == [NONE, unknown, unknown]


def test_several_markers_in_one_partition_follow_each_other(bench: Bench) -> None:
    producer = hanging(bench)
    markers = [marker(producer.producer_id + n, 0, {TOPIC: [0]}) for n in range(3)]
    assert ask(bench, *markers) == [NONE] * 3
    assert bench.partition().log.end_offset == 4
    assert [written.producer_id for written in bench.markers()] == [
        producer.producer_id + n for n in range(3)
    ]


def test_an_open_one_may_not_come_after_offsets_were_given(bench: Bench) -> None:
    producer = opened(bench)
    stranger = marker(999, 0, {TOPIC: [0]})
    wanted = marker(*producer.identity, {TOPIC: [0]})
    assert ask(bench, stranger, wanted) == [NONE, ErrorCode.OPERATION_NOT_ATTEMPTED]
    assert bench.state_of("app") is State.ONGOING
    assert ask(bench, wanted, marker(998, 0, {TOPIC: [0]})) == [NONE, NONE]
    assert bench.partition().log.end_offset == 4


def test_at_the_last_epoch_the_new_id_is_on_disk_first(bench: Bench) -> None:
    producer = exhausted(bench)
    write(producer)
    bench.broker.producer_ids.skip_given()
    assert ask(bench, marker(*producer.identity, {TOPIC: [0]})) == [NONE]
    assert bench.last_decision.sync
    assert bench.transaction("app").epoch == 0
    assert bench.markers()[-1].producer_epoch == 32_767
