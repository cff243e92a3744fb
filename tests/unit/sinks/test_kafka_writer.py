"""Writers of one epoch that take turns at partitions, without a broker."""

import asyncio

import pyarrow as pa
import pytest

from semel.client.metadata import Address, TopicPartition
from semel.client.shared_transaction import TransactionHandle
from semel.errors import SemelError
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka import KafkaPlan, KafkaSink, KafkaWriter
from semel.sinks.kafka.claim_service import LocalClaims
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.kafka.rows import RecordRows
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.kafka.writer import ENOUGH_BYTES, HomeAccess
from semel.sinks.receipts import Place
from semel.sinks.service import ServiceAddress

PLACE = Place("run", 0, 0)
PARTITIONS = 2
TIMEOUT_S = 5.0


class Unlucky(KafkaWriter):
    """Gets the partition of its own number, and fails there when the other writer has its own, too."""

    both_have_one: asyncio.Barrier
    is_time: asyncio.Event

    async def _take_turn(self, where: TopicPartition) -> None:
        is_own = where.partition == self._claimant.task
        if not is_own:
            await self.is_time.wait()
        await self._claims.take(self._claimant, where, keeps=False)
        if is_own:
            await self.both_have_one.wait()
            self.is_time.set()

    async def _encode_run(self, where: TopicPartition, rows: RecordRows, shape: TopicShape) -> None:
        raise SemelError(f"{where} is not for us")


def plan() -> KafkaPlan:
    sink = KafkaSink("localhost:1", "out", partition_column="p")
    settings = sink._writer_settings({"out": TopicShape(PARTITIONS, 1_000_000)})
    handle = TransactionHandle("localhost:1", "semel-sink.x", 7, 5, 2)
    return KafkaPlan(PLACE, handle, settings, ServiceAddress(Address("h", 1), "t"))


async def write(writer: Unlucky) -> None:
    """Rows for both partitions."""
    rows = pa.record_batch({"key": [b"k"] * 2, "value": [b"v"] * 2, "p": [0, 1]})
    try:
        await writer.write(rows)
        await writer.finish()
    finally:
        await writer.cancel()


class Gathering(KafkaWriter):
    """Says how many rows it would have sent each time."""

    sent: list[int]

    async def _send(self, batch: pa.RecordBatch, first_row: int) -> None:
        assert first_row == sum(self.sent)
        self.sent.append(batch.num_rows)


async def test_large_rows_are_sent_before_there_are_enough_of_them() -> None:
    home = HomeAccess(None, None, KafkaSink("localhost:1", "out").metrics)  # type: ignore[arg-type]
    writer = Gathering(plan(), 0, "0", 1, home)
    writer.sent = []
    a_third = pa.record_batch(
        {"key": [b"k"] * 20, "value": [b"v" * (ENOUGH_BYTES // 60)] * 20, "p": [0] * 20}
    )
    for _ in range(7):
        await writer.write(a_third)
    assert writer.sent == [60, 60]


async def test_writers_that_have_failed_do_not_wait_for_each_others_partitions() -> None:
    """As when their owner is fenced: each has a partition, and rows for the one that the other has."""
    book = ClaimBook()
    book.open(PLACE)

    async def join(partitions: object) -> None:
        pass

    async def no_shape(topic: str) -> None:
        pass

    sink = KafkaSink("localhost:1", "out")
    both_have_one, is_time = asyncio.Barrier(PARTITIONS), asyncio.Event()
    writers = []
    for task in range(PARTITIONS):
        home = HomeAccess(LocalClaims(book, join, no_shape), None, sink.metrics)  # type: ignore[arg-type]
        writer = Unlucky(plan(), task, "0", PARTITIONS, home)
        writer.both_have_one, writer.is_time = both_have_one, is_time
        writers.append(writer)
    async with asyncio.timeout(TIMEOUT_S):
        outcomes = await asyncio.gather(*map(write, writers), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WriteFailed, WriteFailed]
    with pytest.raises(Exception, match="went away while it wrote"):
        book.check_covered([])
