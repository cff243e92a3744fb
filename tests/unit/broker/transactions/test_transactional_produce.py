"""Produce on behalf of transactions: what may enter one, and what never may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator_cases import (
    ABORTABLE,
    BAD_MAPPING,
    BAD_STATE,
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

from semel.broker.core import Limits
from semel.broker.produce import produce
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.records import Record, build_batch, build_end_marker

VERSIONS = range(3, 14)
JOINING = (12, 13)
NOT_JOINING = range(3, 12)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def outside(version: int) -> ErrorCode:
    """What a batch outside of its transaction is answered with."""
    return ABORTABLE if version >= 11 else BAD_STATE


@pytest.mark.parametrize("version", JOINING)
def test_a_batch_of_version_2_brings_its_partition_along(bench: Bench, version: int) -> None:
    producer = started(bench)
    assert producer.produce(1, version=version) == NONE
    assert bench.state_of("app") is State.ONGOING
    assert [index for _, index in bench.transaction("app").partitions] == [1]
    assert bench.last_stable_offset(index=1) == 0


@pytest.mark.parametrize("version", NOT_JOINING)
def test_a_batch_of_version_1_needs_its_partition_added_first(bench: Bench, version: int) -> None:
    producer = started(bench)
    assert producer.produce(version=version) == outside(version)
    assert bench.state_of("app") is State.EMPTY
    assert producer.add() == NONE
    assert producer.produce(version=version) == NONE
    assert producer.produce(1, version=version) == outside(version)
    assert producer.produce(0, OTHER_TOPIC, version=version) == outside(version)
    assert bench.partition(index=1).log.end_offset == 0


def committed_by_v1(bench: Bench) -> Producer:
    producer = opened(bench, version=4)
    late = producer.twin()
    assert producer.commit(4) == NONE
    return late


def aborted_by_v1(bench: Bench) -> Producer:
    producer = opened(bench, version=4)
    late = producer.twin()
    assert producer.abort(4) == NONE
    return late


def committed_by_v2(bench: Bench) -> Producer:
    producer = opened(bench)
    late = producer.twin()
    assert producer.commit() == NONE
    return late


def into_the_next_of_v2(bench: Bench) -> Producer:
    late = committed_by_v2(bench)
    next_one = late.twin()
    next_one.take(late.producer_id, late.epoch + 1)
    write(next_one)
    return late


def timed_out(bench: Bench) -> Producer:
    producer = opened(bench)
    bench.advance(TIMEOUT_MS)
    return producer


def replaced(bench: Bench) -> Producer:
    producer = opened(bench)
    started(bench)
    return producer


def replaced_by_an_open_one(bench: Bench) -> Producer:
    producer = opened(bench)
    write(started(bench))
    return producer


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "when",
    (
        committed_by_v1,
        aborted_by_v1,
        committed_by_v2,
        into_the_next_of_v2,
        timed_out,
        replaced,
        replaced_by_an_open_one,
    ),
)
def test_a_late_batch_never_enters_or_opens_a_transaction(
    bench: Bench, version: int, when: Callable[[Bench], Producer]
) -> None:
    late = when(bench)
    if when in (committed_by_v1, aborted_by_v1) and version in JOINING:
        pytest.skip("a client of version 2 never ends by version 1")
    state, open_before = bench.state_of("app"), dict(bench.partition().log.open_transactions)
    end_offset = bench.partition().log.end_offset
    expected = outside(version) if when in (committed_by_v1, aborted_by_v1) else OLD_EPOCH
    assert late.produce(version=version) == expected
    assert late.produce(2, version=version) == expected
    assert late.produce(version=version, sequence=0) == expected, "nor does one that is there already pass"
    assert bench.partition().log.end_offset == end_offset
    assert bench.partition(index=2).log.end_offset == 0
    assert bench.state_of("app") is state
    assert bench.partition().log.open_transactions == open_before


@pytest.mark.parametrize("version", VERSIONS)
def test_a_producer_that_does_not_have_the_transactional_id_is_refused(bench: Bench, version: int) -> None:
    opened(bench)
    foreign = started(bench, "other")
    foreign.transactional_id = "app"
    assert foreign.produce(version=version) == BAD_MAPPING
    foreign.transactional_id = "nobody"
    assert foreign.produce(version=version) == BAD_MAPPING
    assert bench.partition().log.end_offset == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_a_transactional_batch_needs_a_request_with_a_transactional_id(bench: Bench, version: int) -> None:
    producer = started(bench)
    producer.add()
    assert producer.produce(version=version, named=False) == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert bench.partition().log.end_offset == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_batch_outside_of_transactions_cannot_hide_in_an_open_one(bench: Bench, version: int) -> None:
    producer = opened(bench)
    for named in (True, False):
        assert producer.produce(version=version, transactional=False, named=named) == BAD_STATE
    assert bench.partition().log.end_offset == 1
    assert producer.commit() == NONE
    assert producer.produce(version=version, transactional=False, named=False) == NONE


@pytest.mark.parametrize("version", (9, 12))
def test_a_fenced_producer_cannot_pass_by_leaving_the_flag_away(bench: Bench, version: int) -> None:
    old = opened(bench)
    started(bench)
    # Partition 2 knows nothing of the producer: it is the coordinator that refuses.
    assert old.produce(2, version=version, transactional=False, named=False) == OLD_EPOCH


@pytest.mark.parametrize("version", (3, 9, 12))
def test_clients_cannot_write_markers_by_produce(bench: Bench, version: int) -> None:
    producer = opened(bench)
    forged = build_end_marker(
        commit=True,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        coordinator_epoch=1,
        timestamp=bench.wall_ms,
        base_offset=1,
        leader_epoch=1,
    )
    assert send_bytes(bench, producer, bytearray(forged), version) == ErrorCode.INVALID_RECORD
    assert bench.last_stable_offset() == 0
    assert bench.state_of("app") is State.ONGOING


@pytest.mark.parametrize(
    "fields",
    (
        {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1},
        {"producer_epoch": -1},
        {"base_sequence": -1},
        {"producer_id": -2},
    ),
)
def test_a_transactional_batch_has_an_id_an_epoch_and_a_sequence(
    bench: Bench, fields: dict[str, int]
) -> None:
    producer = opened(bench)
    given = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch, "base_sequence": 1}
    batch = build_batch([Record(None, b"x", bench.wall_ms)], transactional=True, **{**given, **fields})
    assert send_bytes(bench, producer, batch, 12) == ErrorCode.INVALID_RECORD
    assert bench.partition().log.end_offset == 1


def send_bytes(bench: Bench, producer: Producer, batch: bytearray, version: int) -> int:
    part = PartitionProduceData(index=0, records=memoryview(batch))
    request = ProduceRequest(
        transactional_id=producer.transactional_id,
        acks=-1,
        topic_data=[TopicProduceData(name=TOPIC, partition_data=[part])],
    )
    code: int = bench.ask(produce, request, version).responses[0].partition_responses[0].error_code
    return code


@pytest.mark.parametrize("version", VERSIONS)
def test_a_repeated_batch_is_answered_with_its_first_offset(bench: Bench, version: int) -> None:
    producer = started(bench)
    producer.add()
    producer.produce(version=version, records=3)
    first = producer.send(version=version, records=2)
    again = producer.send(version=version, records=2, sequence=3)
    assert (again.error_code, again.base_offset) == (NONE, first.base_offset) == (NONE, 3)
    assert producer.produce(version=version, sequence=9) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert bench.partition().log.end_offset == 5


def test_a_version_2_transaction_begins_at_sequence_0_in_every_partition(bench: Bench) -> None:
    producer = opened(bench)
    producer.commit()
    assert producer.produce(sequence=1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert bench.state_of("app") is State.COMPLETE_COMMIT
    assert producer.produce(sequence=0) == NONE


def test_one_request_can_bring_many_partitions_up_to_the_limit() -> None:
    bench = Bench(Limits(max_transaction_partitions=2))
    producer = started(bench)
    batches = [
        build_batch(
            [Record(None, b"x", bench.wall_ms)],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            base_sequence=0,
            transactional=True,
        )
        for _ in range(3)
    ]
    data = [PartitionProduceData(index=n, records=memoryview(batch)) for n, batch in enumerate(batches)]
    request = ProduceRequest(
        transactional_id="app", acks=-1, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)]
    )
    answers = bench.ask(produce, request, 12).responses[0].partition_responses
    assert [answer.error_code for answer in answers] == [NONE, NONE, ErrorCode.POLICY_VIOLATION]
    assert "would have 3 partitions and groups, and transaction.max.partitions is 2" in str(
        answers[2].error_message
    )
    assert len(bench.transaction("app").partitions) == 2
    assert producer.add(2) == ErrorCode.POLICY_VIOLATION
    assert producer.commit() == NONE


def test_a_batch_that_is_refused_does_not_open_a_transaction(bench: Bench) -> None:
    producer = started(bench)
    producer.produce()
    producer.commit()
    assert producer.produce(sequence=7) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.produce(9) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert bench.state_of("app") is State.COMPLETE_COMMIT
    assert len(bench.broker.transaction_deadlines) == 0


def test_transactions_of_two_producers_share_a_partition(bench: Bench) -> None:
    one, two = opened(bench, "one"), opened(bench, "two")
    log = bench.partition().log
    assert log.last_stable_offset == 0
    assert two.abort() == NONE
    assert log.last_stable_offset == 0
    assert one.commit() == NONE
    assert log.last_stable_offset == 4
    write(two)
    assert log.last_stable_offset == 4


def test_the_last_epoch_is_good_for_a_whole_transaction(bench: Bench) -> None:
    producer = exhausted(bench)
    for version in (9, 12):
        producer.add()
        assert producer.produce(version=version) == NONE
    assert producer.commit(4) == NONE
    assert bench.markers()[-1].producer_epoch == 32_766
