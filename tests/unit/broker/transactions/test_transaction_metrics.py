"""Claims about what operators are told: each transaction counts once, and every fencing counts."""

import logging

import pytest
from coordinator_cases import TIMEOUT_MS, TOPIC, Bench, Producer

from semel.broker.core import Limits
from semel.broker.decision import Decision
from semel.broker.produce import produce
from semel.server.metrics import MAX_LABELLED_PARTITIONS, Metrics
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.records import Record, build_batch


class CountingBench(Bench):
    """Counts what it applies, as a life does."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.metrics = Metrics()
        super().__init__(limits)

    def submit(self, decision: Decision) -> None:
        self.metrics.deciding(self.broker, decision.entries)
        super().submit(decision)

    def figure(self, name: str) -> str:
        (line,) = [line for line in self.lines() if line.startswith(f"{name} ")]
        return line.split()[1]

    def lines(self) -> list[str]:
        return self.metrics.render(self.broker, 0, self.wall_ms).splitlines()


def produce_to(bench: Bench, producer: Producer, *partitions: int) -> None:
    """One request of version 2, by which all these partitions join."""
    producer_id, epoch = producer.identity
    batch = build_batch(
        [Record(b"k", b"v", 1)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        transactional=True,
    )
    data = [PartitionProduceData(index=index, records=memoryview(bytearray(batch))) for index in partitions]
    asked = ProduceRequest(
        transactional_id="app", acks=-1, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)]
    )
    reply = bench.ask(produce, asked, 12)
    assert [part.error_code for part in reply.responses[0].partition_responses] == [0] * len(partitions)


def test_a_transaction_that_begins_in_many_partitions_has_begun_once() -> None:
    bench = CountingBench()
    producer = Producer(bench)
    producer.init()
    produce_to(bench, producer, 0, 1)
    assert bench.figure("semel_transactions_started_total") == "1"
    assert bench.figure("semel_transactions_active") == "1"
    producer.end(commit=True, version=5)
    assert bench.figure("semel_transactions_committed_total") == "1"
    assert bench.figure("semel_transaction_markers_total") == "2"
    assert bench.figure("semel_transactions_active") == "0"


def test_an_abort_of_nothing_is_no_abort() -> None:
    bench = CountingBench()
    producer = Producer(bench)
    producer.init()
    producer.end(commit=False, version=5)
    assert bench.figure("semel_transactions_aborted_total") == "0"


@pytest.mark.parametrize("version", [1, 5])
def test_a_zombie_that_wants_to_commit_counts_as_fenced(version: int) -> None:
    bench = CountingBench()
    zombie = Producer(bench)
    zombie.init()
    zombie.add()
    Producer(bench).init()
    zombie.end(commit=True, version=version)
    assert bench.figure("semel_transactions_fenced_total") == "1"
    assert bench.figure("semel_transactions_aborted_total") == "1"


def test_a_timeout_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = CountingBench()
    producer = Producer(bench)
    producer.init()
    producer.add()
    with caplog.at_level(logging.WARNING):
        bench.advance(TIMEOUT_MS)
    assert bench.figure("semel_transactions_timed_out_total") == "1"
    assert bench.figure("semel_transactions_aborted_total") == "1"
    assert "aborting the transaction of 'app'" in caplog.text


def test_the_age_of_the_oldest_open_transaction_is_shown() -> None:
    bench = CountingBench()
    producer = Producer(bench)
    producer.init()
    producer.add()
    bench.advance(1500)
    assert bench.figure("semel_transaction_oldest_seconds") == "1.5"


def test_open_transactions_that_may_be_prepared_are_told_from_the_others() -> None:
    bench = CountingBench(Limits(two_phase_commit=True))
    for name, two_phase in (("plain", False), ("prepared", True)):
        producer = Producer(bench, name)
        producer.init(6, enable_2pc=two_phase)
        assert producer.add() == 0
    assert bench.figure("semel_transactions_active") == "2"
    assert bench.figure("semel_transactions_prepared") == "1"


def test_a_batch_that_comes_again_is_counted() -> None:
    bench = CountingBench()
    producer = Producer(bench)
    producer.init()
    for _ in range(3):
        assert producer.produce(sequence=0) == 0
    assert bench.figure("semel_produce_duplicates_total") == "2"


def test_what_readers_cannot_see_yet_is_shown_for_the_partitions_that_are_furthest_behind() -> None:
    bench = CountingBench()
    partitions = MAX_LABELLED_PARTITIONS + 5
    bench.create_topic("wide", partitions)
    producer = Producer(bench)
    producer.init()
    for index in range(partitions):
        assert producer.produce(index, "wide", records=index + 1) == 0
    lags = [line for line in bench.lines() if line.startswith("semel_last_stable_offset_lag{")]
    assert len(lags) == MAX_LABELLED_PARTITIONS
    last = partitions - 1
    assert lags[0] == f'semel_last_stable_offset_lag{{topic="wide",partition="{last}"}} {partitions}'
    assert producer.commit() == 0
    assert not [line for line in bench.lines() if line.startswith("semel_last_stable_offset_lag{")]
