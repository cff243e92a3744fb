"""Writers of one epoch that take turns at partitions, without a broker."""

import asyncio
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from semel.client.metadata import Address, TopicPartition
from semel.client.shared_transaction import TransactionHandle
from semel.errors import SemelError
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.kafka import KafkaPlan, KafkaSink, KafkaWriter
from semel.sinks.kafka.claim_service import LocalClaims
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.kafka.rows import RecordRows
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.kafka.writer import ENOUGH_BYTES, HomeAccess
from semel.sinks.receipts import Attempt, Place
from semel.sinks.service import ServiceAddress
from semel.wire.columns import BinaryColumn

PLACE = Place("run", 0, 0)
PARTITIONS = 2
TIMEOUT_S = 5.0
MAX_BATCH_BYTES = 1_000_000
MANY_ROWS = 9_000


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
    settings = sink._writer_settings({"out": TopicShape(PARTITIONS, MAX_BATCH_BYTES)})
    handle = TransactionHandle("localhost:1", "semel-sink.x", 7, 5, 2)
    return KafkaPlan(PLACE, handle, settings, ServiceAddress(Address("h", 1), "t"))


def opened_book() -> ClaimBook:
    book = ClaimBook()
    book.open(PLACE)
    return book


def home_of(book: ClaimBook) -> HomeAccess:
    async def join(partitions: object) -> None:
        pass

    async def no_shape(topic: str) -> None:
        pass

    metrics = KafkaSink("localhost:1", "out").metrics
    return HomeAccess(LocalClaims(book, join, no_shape), None, metrics)  # type: ignore[arg-type]


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


async def test_rows_of_types_that_do_not_go_together_are_sent_one_after_the_other() -> None:
    """A column that no record has is enough for it."""
    home = HomeAccess(None, None, KafkaSink("localhost:1", "out").metrics)  # type: ignore[arg-type]
    writer = Gathering(plan(), 0, "0", 1, home)
    writer.sent = []
    for price in (Decimal("1.25"), 2, 3):
        await writer.write([{"key": b"k", "value": b"v", "p": 0, "price": price}])
    await writer._send_gathered()
    assert writer.sent == [1, 2]


async def test_writers_that_have_failed_do_not_wait_for_each_others_partitions() -> None:
    """As when their owner is fenced: each has a partition, and rows for the one that the other has."""
    book = opened_book()
    both_have_one, is_time = asyncio.Barrier(PARTITIONS), asyncio.Event()
    writers = []
    for task in range(PARTITIONS):
        writer = Unlucky(plan(), task, "0", PARTITIONS, home_of(book))
        writer.both_have_one, writer.is_time = both_have_one, is_time
        writers.append(writer)
    async with asyncio.timeout(TIMEOUT_S):
        outcomes = await asyncio.gather(*map(write, writers), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WriteFailed, WriteFailed]
    with pytest.raises(Exception, match="went away while it wrote"):
        book.check_covered([])


class Acknowledged:
    """A partition whose broker has whatever it is sent, at once."""

    def __init__(self) -> None:
        self.next_sequence = self.records_written = self.bytes_written = 0

    def begin_at(self, sequence: int) -> None:
        self.next_sequence = sequence

    async def write_columns(self, values: BinaryColumn, *given: object, max_batch_bytes: int) -> None:
        self.records_written += len(values)
        self.next_sequence += len(values)

    async def flush(self) -> None:
        pass


class WithoutBroker(KafkaWriter):
    """Claims as any other, and is acknowledged whatever it sends."""

    async def _open(self) -> Any:
        return SimpleNamespace(partition=lambda *where: Acknowledged())


def rows_for_both(count: int, last_value: bytes = b"v") -> pa.RecordBatch:
    """More than are gathered."""
    values = [b"v"] * (count - 1) + [last_value]
    return pa.record_batch({"key": [b"k"] * count, "value": values, "p": [0, 1] * (count // 2)})


async def test_a_writer_whose_write_was_cancelled_gives_no_receipt() -> None:
    """A part of the rows is there: the receipt would account for that part, and for no more."""
    book = opened_book()
    elsewhere = Attempt.new(PLACE, 1, "0")
    await book.take(elsewhere, TopicPartition("out", 1))
    writer = WithoutBroker(plan(), 0, "0", PARTITIONS, home_of(book))
    writing = asyncio.create_task(writer.write(rows_for_both(MANY_ROWS)))
    async with asyncio.timeout(TIMEOUT_S):
        while TopicPartition("out", 0) not in writer._partitions or writer._held:  # noqa: ASYNC110
            await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    for again in (writer.write([]), writer.finish()):
        with pytest.raises(WriteFailed, match="writers are used once"):
            await again
    await writer.cancel()
    book.give(elsewhere, TopicPartition("out", 1), 0)
    with pytest.raises(CommitFailed, match="task 0 has written to out-0 and gave no receipt"):
        book.check_covered([])


async def test_a_writer_whose_row_was_refused_gives_no_receipt_for_the_others() -> None:
    book = opened_book()
    writer = WithoutBroker(plan(), 0, "0", PARTITIONS, home_of(book))
    with pytest.raises(WriteFailed, match=r"max\.message\.bytes") as caught:
        await writer.write(rows_for_both(MANY_ROWS, last_value=b"v" * 2 * MAX_BATCH_BYTES))
    assert caught.value.is_permanent
    with pytest.raises(WriteFailed, match="or has failed"):
        await writer.finish()
    await writer.cancel()


async def test_a_writer_lets_go_of_its_connections_although_its_owner_is_gone() -> None:
    """As in a thread of its own, when the owner's loop has ended."""
    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    async def in_a_loop_that_ends() -> HomeAccess:
        return home_of(opened_book())

    home = await asyncio.to_thread(asyncio.run, in_a_loop_that_ends())
    writer = KafkaWriter(plan(), 0, "0", PARTITIONS, home)
    shared: Any = SimpleNamespace(close=close)
    writer._shared = shared
    with pytest.raises(WriteFailed, match="or is closed"):
        await writer.cancel()
    assert closed.is_set()
