"""AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit: what joins a transaction, and whose offsets count."""

from __future__ import annotations

import pytest
from coordinator_cases import (
    ABORTABLE,
    BAD_MAPPING,
    BAD_STATE,
    FENCED,
    GROUP,
    NONE,
    OLD_EPOCH,
    OTHER_TOPIC,
    TIMEOUT_MS,
    TOPIC,
    Bench,
    Producer,
    opened,
    started,
    write,
)

from semel.broker.core import Limits
from semel.broker.groups.group_admin import delete_groups
from semel.broker.limit_warnings import INTERVAL_MS
from semel.broker.transactions.joining import add_partitions_to_txn
from semel.broker.transactions.state import State
from semel.wire.errors import ErrorCode
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from semel.wire.messages.delete_groups import DeleteGroupsRequest

ADD_VERSIONS = range(6)
GROUP_VERSIONS = range(5)
COMMIT_VERSIONS = range(6)
UNSTABLE = ErrorCode.UNSTABLE_OFFSET_COMMIT


@pytest.fixture
def bench() -> Bench:
    return Bench()


def add_many(
    bench: Bench, producer: Producer, wanted: dict[str, list[int]], version: int, *, verify: bool = False
) -> dict[tuple[str, int], int]:
    topics = [AddPartitionsToTxnTopic(name=name, partitions=indexes) for name, indexes in wanted.items()]
    if version < 4:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=producer.transactional_id,
            v3_and_below_producer_id=producer.producer_id,
            v3_and_below_producer_epoch=producer.epoch,
            v3_and_below_topics=topics,
        )
        results = bench.ask(add_partitions_to_txn, request, version).results_by_topic_v3_and_below
    else:
        transaction = AddPartitionsToTxnTransaction(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            verify_only=verify,
            topics=topics,
        )
        request = AddPartitionsToTxnRequest(transactions=[transaction])
        results = bench.ask(add_partitions_to_txn, request, version).results_by_transaction[0].topic_results
    return {
        (topic.name, part.partition_index): part.partition_error_code
        for topic in results
        for part in topic.results_by_partition
    }


# Partitions.


@pytest.mark.parametrize("version", ADD_VERSIONS)
def test_partitions_join_and_open_the_transaction(bench: Bench, version: int) -> None:
    producer = started(bench)
    answers = add_many(bench, producer, {TOPIC: [0, 2], OTHER_TOPIC: [1]}, version)
    assert answers == {(TOPIC, 0): NONE, (TOPIC, 2): NONE, (OTHER_TOPIC, 1): NONE}
    assert bench.state_of("app") is State.ONGOING
    assert len(bench.transaction("app").partitions) == 3
    journal = len(bench.journal)
    add_many(bench, producer, {TOPIC: [0, 2]}, version)
    assert len(bench.journal) == journal, "what is in the transaction already changes nothing"


@pytest.mark.parametrize("version", ADD_VERSIONS)
def test_one_partition_that_does_not_exist_keeps_out_all(bench: Bench, version: int) -> None:
    producer = started(bench)
    answers = add_many(bench, producer, {TOPIC: [0, 7], "no-such": [0]}, version)
    assert answers == {
        (TOPIC, 0): ErrorCode.OPERATION_NOT_ATTEMPTED,
        (TOPIC, 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ("no-such", 0): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert bench.state_of("app") is State.EMPTY


@pytest.mark.parametrize("version", ADD_VERSIONS)
def test_adding_by_another_identity_is_refused(bench: Bench, version: int) -> None:
    old = opened(bench)
    started(bench)
    assert old.add(version=version) == (FENCED if version >= 2 else OLD_EPOCH)
    old.producer_id += 9
    assert old.add(version=version) == BAD_MAPPING
    assert Producer(bench, "nobody").add(version=version) == BAD_MAPPING


@pytest.mark.parametrize("version", (4, 5))
def test_verifying_tells_what_is_in_the_transaction_and_adds_nothing(bench: Bench, version: int) -> None:
    producer = opened(bench, version=4)
    answers = add_many(bench, producer, {TOPIC: [0, 1], "no-such": [0]}, version, verify=True)
    no = ABORTABLE if version >= 5 else BAD_STATE
    assert answers == {(TOPIC, 0): NONE, (TOPIC, 1): no, ("no-such", 0): no}
    assert len(bench.transaction("app").partitions) == 1
    producer.commit(4)
    assert add_many(bench, producer, {TOPIC: [0]}, version, verify=True) == {(TOPIC, 0): no}
    assert bench.state_of("app") is State.COMPLETE_COMMIT


def test_one_request_may_speak_for_several_transactions_but_not_twice_for_one(bench: Bench) -> None:
    one, two = started(bench, "one"), started(bench, "two")
    topics = [AddPartitionsToTxnTopic(name=TOPIC, partitions=[0])]
    request = AddPartitionsToTxnRequest(
        transactions=[
            AddPartitionsToTxnTransaction(
                transactional_id=producer.transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                topics=topics,
            )
            for producer in (one, two, one)
        ]
    )
    results = bench.ask(add_partitions_to_txn, request, 5).results_by_transaction
    codes = [result.topic_results[0].results_by_partition[0].partition_error_code for result in results]
    assert codes == [NONE, NONE, ErrorCode.INVALID_REQUEST]
    assert bench.state_of("one") is bench.state_of("two") is State.ONGOING


def test_a_transaction_takes_partitions_and_groups_up_to_its_limit() -> None:
    bench = Bench(Limits(max_transaction_partitions=2))
    producer = started(bench)
    assert producer.add(0) == producer.add_group("g") == NONE
    assert producer.add(0) == producer.add_group("g") == NONE
    assert producer.add(1) == ErrorCode.POLICY_VIOLATION
    assert producer.add_group("h") == ErrorCode.POLICY_VIOLATION
    assert producer.commit_offset(1, group="h") == ErrorCode.POLICY_VIOLATION
    assert producer.commit(4) == NONE


def test_each_limit_that_refuses_is_named_in_the_log_and_does_not_flood_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(Limits(max_transaction_partitions=1, max_open_transactions=1))
    first, second = opened(bench, "first"), started(bench, "second")
    for _ in range(10):
        assert first.add(1) == second.add(0) == ErrorCode.POLICY_VIOLATION
    by_size, by_count = (record.getMessage() for record in caplog.records)
    assert by_size == (
        "refused by transaction.max.partitions: the transaction of 'first' (User:ann) would have 2 "
        "partitions and groups, and transaction.max.partitions is 1"
    )
    assert by_count == (
        "refused by max.open.transactions: 'second' cannot begin a transaction: User:ann has 1 open, "
        "and max.open.transactions is 1"
    )
    caplog.clear()
    bench.monotonic_ms += INTERVAL_MS
    assert first.add(1) == first.add(1) == ErrorCode.POLICY_VIOLATION
    (later,) = (record.getMessage() for record in caplog.records)
    assert later.endswith("is 1 (9 more such refusals since the last warning)")


# Groups.


@pytest.mark.parametrize("version", GROUP_VERSIONS)
def test_a_group_joins_and_opens_the_transaction(bench: Bench, version: int) -> None:
    producer = started(bench)
    assert producer.add_group(version=version) == NONE
    assert bench.state_of("app") is State.ONGOING
    assert producer.add_group("", version=version) == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", GROUP_VERSIONS)
def test_adding_a_group_by_another_identity_is_refused(bench: Bench, version: int) -> None:
    old = opened(bench)
    started(bench)
    assert old.add_group(version=version) == (FENCED if version >= 2 else OLD_EPOCH)
    old.producer_id += 9
    assert old.add_group(version=version) == BAD_MAPPING
    assert Producer(bench, "nobody").add_group(version=version) == BAD_MAPPING


@pytest.mark.parametrize("version", COMMIT_VERSIONS)
def test_offsets_need_their_group_added_unless_version_2_brings_it_along(bench: Bench, version: int) -> None:
    producer = started(bench)
    code = producer.commit_offset(5, version=version)
    if version >= 5:
        assert code == NONE
        assert list(bench.transaction("app").groups) == [GROUP]
        return
    assert code == (ABORTABLE if version >= 4 else BAD_STATE)
    assert bench.state_of("app") is State.EMPTY
    producer.add_group()
    assert producer.commit_offset(5, version=version) == NONE
    assert producer.commit_offset(5, group="another", version=version) != NONE


@pytest.mark.parametrize("version", COMMIT_VERSIONS)
def test_offsets_of_another_identity_are_refused(bench: Bench, version: int) -> None:
    old = started(bench)
    old.add_group()
    started(bench)
    assert old.commit_offset(5, version=version) == OLD_EPOCH
    old.producer_id += 9
    assert old.commit_offset(5, version=version) == BAD_MAPPING
    assert Producer(bench, "nobody").commit_offset(5, version=version) == BAD_MAPPING
    assert GROUP not in bench.broker.groups.by_id


@pytest.mark.parametrize("version", (3, 4, 5))
def test_a_consumer_that_is_no_member_any_more_is_fenced(bench: Bench, version: int) -> None:
    producer = started(bench)
    producer.add_group()
    assert producer.commit_offset(5, version=version, member_id="gone", generation=3) == (
        ErrorCode.ILLEGAL_GENERATION
    )
    assert bench.offset() == -1


def test_late_offsets_of_a_finished_transaction_are_refused(bench: Bench) -> None:
    for ends, version in ((5, 5), (4, 3)):
        producer = started(bench, f"app-{ends}")
        producer.add_group()
        producer.commit_offset(1, version=version)
        late = producer.twin()
        assert producer.end(True, ends).error_code == NONE
        assert late.commit_offset(9, version=version) == (OLD_EPOCH if ends == 5 else BAD_STATE)
        assert bench.offset(stable=True) == 1


def test_bad_offsets_are_refused_one_by_one_and_open_nothing(bench: Bench) -> None:
    producer = started(bench)
    assert producer.commit_offset(1, 9) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert producer.commit_offset(1, topic="no-such") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert producer.commit_offset(1, metadata="x" * 4097) == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert producer.commit_offset(1, group="") == ErrorCode.INVALID_GROUP_ID
    assert bench.state_of("app") is State.EMPTY
    assert producer.commit_offset(1, metadata="x" * 4096) == NONE


# What readers of offsets see.


@pytest.mark.parametrize("commit", (True, False))
def test_exactly_the_offsets_of_the_open_transaction_are_unstable(bench: Bench, commit: bool) -> None:
    bench.commit_offset(3, 0)
    bench.commit_offset(4, 1)
    producer = started(bench)
    assert producer.commit_offset(30, 0) == NONE
    assert bench.offset(0, stable=True) == UNSTABLE
    assert bench.offset(0) == 3
    assert bench.offset(1, stable=True) == bench.offset(1) == 4
    assert bench.offset(0, stable=True, group="others") == -1
    producer.end(commit)
    assert bench.offset(0, stable=True) == (30 if commit else 3)
    assert bench.offset(1, stable=True) == 4


@pytest.mark.parametrize("restarts", (False, True))
def test_the_later_write_wins_over_a_plain_commit(bench: Bench, restarts: bool) -> None:
    producer = started(bench)
    producer.commit_offset(30, 0)
    bench.commit_offset(99, 0)
    bench.commit_offset(77, 1)
    producer.commit_offset(40, 1)
    if restarts:
        bench.restart_from_snapshot()
    producer.commit()
    assert bench.offset(0, stable=True) == 99, "the plain commit was written after it"
    assert bench.offset(1, stable=True) == 40, "the plain commit was written before it"


def test_two_transactions_on_one_offset_leave_the_later_write(bench: Bench) -> None:
    one, two = started(bench, "one"), started(bench, "two")
    one.commit_offset(10)
    two.commit_offset(20)
    two.commit()
    assert bench.offset(stable=True) == UNSTABLE
    one.commit()
    assert bench.offset(stable=True) == 20


def test_a_group_with_pending_offsets_cannot_be_deleted(bench: Bench) -> None:
    producer = started(bench)
    producer.commit_offset(10)
    request = DeleteGroupsRequest(groups_names=[GROUP])
    assert bench.ask(delete_groups, request, 2).results[0].error_code == ErrorCode.NON_EMPTY_GROUP
    producer.commit()
    assert bench.offset() == 10
    assert bench.ask(delete_groups, request, 2).results[0].error_code == NONE


def test_offsets_that_a_crash_left_pending_are_released_by_the_timeout(bench: Bench) -> None:
    bench.commit_offset(3)
    producer = started(bench)
    producer.commit_offset(10)
    bench.restart()
    assert bench.offset(stable=True) == UNSTABLE
    bench.advance(TIMEOUT_MS)
    assert bench.offset(stable=True) == 3


def test_offsets_of_a_topic_deleted_meanwhile_do_not_become_its_successor_s(bench: Bench) -> None:
    producer = started(bench)
    producer.commit_offset(10)
    bench.delete_topic(TOPIC)
    bench.create_topic(TOPIC)
    assert producer.commit() == NONE
    assert bench.offset(stable=True) == -1


def test_offsets_and_records_end_together(bench: Bench) -> None:
    producer = opened(bench)
    producer.commit_offset(10)
    write(producer, index=1)
    bench.restart()
    assert bench.offset(stable=True) == UNSTABLE
    assert producer.commit() == NONE
    assert (bench.offset(stable=True), bench.last_stable_offset(index=1)) == (10, 2)
