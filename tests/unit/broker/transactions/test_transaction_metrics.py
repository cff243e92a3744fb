"""Claims about what operators are told: each transaction counts once, and every fencing counts."""

import logging

import pytest
from coordinator_cases import TIMEOUT_MS, TOPIC, Bench, Producer

from semel.broker.decision import Decision
from semel.broker.produce import produce
from semel.server.metrics import Metrics
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.records import Record, build_batch


class CountingBench(Bench):
    """Counts what it applies, as a life does."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        super().__init__()

    def submit(self, decision: Decision) -> None:
        self.metrics.deciding(self.broker, decision.entries)
        super().submit(decision)

    def figure(self, name: str) -> str:
        text = self.metrics.render(self.broker, 0, self.wall_ms)
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return line.split()[1]


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
