"""What readers get of transactions from the files: segments that end on markers, restarts, compaction.

Random interleaved transactions of a few producers on one partition, held against a model of them.
The seed is in the test's name.
"""

from __future__ import annotations

import random
import time
from typing import Final

import pytest
from broker_process import BrokerProcess, StartBroker
from confluent_kafka import Consumer, TopicPartition
from raw_client import RawClient, create_topic
from txn_cases import COMMITTED, FETCH_WAIT_MS, TIMEOUT_S, UNCOMMITTED

from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

PRODUCERS: Final = 3
STEPS: Final = 300
KEYS: Final = 5
SEEDS: Final = (1, 2, 3)
PATIENCE_S: Final = 20.0

Row = tuple[int, str, str]
"""Offset, key and value of a record."""


class RawProducer:
    """Transactions of version 2, by hand and without waits."""

    def __init__(self, client: RawClient, transactional_id: str, topic: str) -> None:
        self._client = client
        self._id = transactional_id
        self._topic = topic
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000)
        given = client.ask(request, 5, InitProducerIdResponse)
        assert given.error_code == 0
        self._identity = given.producer_id, given.producer_epoch
        self._sequence = 0
        self.rows: list[Row] = []
        """What the open transaction has written."""

    def write(self, rows: list[tuple[str, str]]) -> None:
        now_ms = int(time.time() * 1000)
        batch = build_batch(
            [Record(key.encode(), value.encode(), now_ms) for key, value in rows],
            producer_id=self._identity[0],
            producer_epoch=self._identity[1],
            base_sequence=self._sequence,
            transactional=True,
        )
        part = PartitionProduceData(index=0, records=memoryview(batch))
        request = ProduceRequest(
            transactional_id=self._id,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[TopicProduceData(name=self._topic, partition_data=[part])],
        )
        told = self._client.ask(request, 12, ProduceResponse).responses[0].partition_responses[0]
        assert told.error_code == 0, told
        self._sequence += len(rows)
        self.rows += [(told.base_offset + n, key, value) for n, (key, value) in enumerate(rows)]

    def end(self, commit: bool) -> list[Row]:
        """End the transaction; what it has written."""
        producer_id, epoch = self._identity
        request = EndTxnRequest(
            transactional_id=self._id, producer_id=producer_id, producer_epoch=epoch, committed=commit
        )
        ended = self._client.ask(request, 5, EndTxnResponse)
        assert ended.error_code == 0, ended
        self._identity, self._sequence = (ended.producer_id, ended.producer_epoch), 0
        rows, self.rows = self.rows, []
        return rows


class Model:
    """What was written, and what of it is committed."""

    def __init__(self, seed: int, client: RawClient, topic: str) -> None:
        self._dice = random.Random(seed)
        self.producers = [RawProducer(client, f"{topic}-{n}", topic) for n in range(PRODUCERS)]
        self.committed: list[Row] = []
        self.written = 0

    def step(self) -> None:
        producer = self._dice.choice(self.producers)
        if producer.rows and self._dice.random() < 0.5:
            commit = self._dice.random() < 0.5
            rows = producer.end(commit)
            self.committed += rows if commit else []
            return
        count = self._dice.randint(1, 3)
        producer.write([(f"k{self._dice.randrange(KEYS)}", f"v{self.written + n}") for n in range(count)])
        self.written += count

    def finish(self) -> None:
        for producer in self.producers:
            if producer.rows:
                self.committed += producer.end(True)
        self.committed.sort()

    @property
    def visible(self) -> list[Row]:
        """What read_committed shows: nothing at or past the first offset of the oldest open transaction."""
        stable = min((producer.rows[0][0] for producer in self.producers if producer.rows), default=2**62)
        return sorted(row for row in self.committed if row[0] < stable)


def read(bootstrap: str, topic: str, start: int, isolation: str = COMMITTED) -> list[Row]:
    """Everything from an offset to the end that a reader of this isolation level is told."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "log_level": 0,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, start)])
        rows: list[Row] = []
        while (message := consumer.poll(TIMEOUT_S)) is not None:
            if message.error() is not None:
                return rows
            offset, key, value = message.offset(), message.key(), message.value()
            assert offset is not None and key is not None and value is not None
            rows.append((offset, key.decode(), value.decode()))
        raise AssertionError(f"the end of {topic} was not reached")
    finally:
        consumer.close()


def check(process: BrokerProcess, topic: str, model: Model, dice: random.Random) -> None:
    """Readers that begin anywhere get exactly what is committed from there on."""
    # Not past the end for this isolation level: there a reader waits for the open transaction.
    last = model.visible[-1][0] if model.visible else 0
    for start in (0, *(dice.randrange(last + 1) for _ in range(4))):
        assert read(process.bootstrap, topic, start) == [row for row in model.visible if row[0] >= start]


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_get_what_is_committed_from_any_offset_also_after_restarts(
    start_broker: StartBroker, topic: str, seed: int
) -> None:
    # Segments of a few batches, so that many end on a marker; snapshots and flushes all the time.
    process = start_broker(snapshot_interval_bytes=4_000, flush_interval_bytes=20_000)
    dice = random.Random(seed)
    with RawClient(process.port) as client:
        create_topic(client, topic, **{"segment.bytes": "600", "index.interval.bytes": "100"})
        model = Model(seed, client, topic)
        for n in range(STEPS):
            model.step()
            if n % (STEPS // 3) == 0:
                check(process, topic, model, dice)
        check(process, topic, model, dice)
    process.restart()
    check(process, topic, model, dice)
    assert process.stop() == 0
    process.start()
    check(process, topic, model, dice)
    with RawClient(process.port) as client:
        for producer in model.producers:
            producer._client = client
        model.finish()
        check(process, topic, model, dice)
    assert len(read(process.bootstrap, topic, 0, UNCOMMITTED)) == model.written


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_compaction_keeps_the_last_committed_value_of_each_key_and_no_aborted_one(
    start_broker: StartBroker, topic: str, seed: int
) -> None:
    process = start_broker(
        log_cleaner_backoff_ms=50, snapshot_interval_bytes=4_000, flush_interval_bytes=4_000
    )
    with RawClient(process.port) as client:
        create_topic(
            client,
            topic,
            **{"cleanup.policy": "compact", "segment.bytes": "600", "min.cleanable.dirty.ratio": "0"},
        )
        model = Model(seed, client, topic)
        for n in range(STEPS):
            model.step()
            if n % 50 == 0:
                check_compacted(process, topic, model)
        model.finish()
    give_up = time.monotonic() + PATIENCE_S
    while (left := len(check_compacted(process, topic, model))) > len(model.committed) // 4:
        assert time.monotonic() < give_up, f"{left} of {len(model.committed)} rows are left"
        time.sleep(0.1)
    process.restart()
    check_compacted(process, topic, model)


def check_compacted(process: BrokerProcess, topic: str, model: Model) -> list[Row]:
    rows = read(process.bootstrap, topic, 0)
    visible = model.visible
    assert set(rows) <= set(visible), "an aborted or invented row was read"
    assert rows == sorted(rows)
    assert {key: value for _, key, value in rows} == {key: value for _, key, value in visible}
    return rows
