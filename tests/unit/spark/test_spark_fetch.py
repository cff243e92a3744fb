"""Fetching a range: to its end, through failures, and never past what was asked for."""

import pytest
from fake_broker import FakeBroker, hang_up

from semel.client.admin import READ_COMMITTED
from semel.client.cluster import Cluster
from semel.client.errors import UnreachableError
from semel.client.metadata import TopicPartition
from semel.spark.source_fetch import MAX_FETCH_BYTES, MIN_FETCH_BYTES, DataLostError, RangeFetch
from semel.spark.source_offsets import OffsetRange
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.records import Record, build_batch

WHERE = TopicPartition("t", 0)
BATCH_RECORDS = 10


def fill(broker: FakeBroker, batches: int) -> None:
    for _ in range(batches):
        batch = build_batch([Record(None, b"x" * 50, 0)] * BATCH_RECORDS)
        broker.topics["t"][0].store(batch, read_header(batch))


async def offsets_of(
    broker: FakeBroker,
    start: int,
    end: int,
    *,
    fails_on_data_loss: bool = True,
    retry_timeout_ms: int = 5_000,
) -> list[int]:
    """The base offsets of the batches that a range brings."""
    found: list[int] = []
    async with Cluster(broker.bootstrap) as cluster:
        fetch = RangeFetch(
            cluster,
            OffsetRange(WHERE, start, end),
            isolation_level=READ_COMMITTED,
            fails_on_data_loss=fails_on_data_loss,
            retry_timeout_ms=retry_timeout_ms,
        )
        try:
            while not fetch.is_done:
                found += [header.base_offset for header, _ in await fetch.next_batches()]
        finally:
            await fetch.close()
    return found


async def test_a_range_brings_the_batches_that_overlap_it_and_no_others() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 10)
        assert await offsets_of(broker, 25, 61) == [20, 30, 40, 50, 60]
        assert len(broker.seen(ApiKey.FETCH)) == 1


async def test_a_lost_answer_is_asked_for_again() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 3)
        broker.misbehave(ApiKey.FETCH, hang_up, hang_up)
        assert await offsets_of(broker, 0, 30) == [0, 10, 20]


async def test_a_broker_that_does_not_come_back_is_an_error_in_the_end() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 1)
        broker.misbehave(ApiKey.FETCH, *[hang_up] * 100)
        with pytest.raises(UnreachableError, match="lost"):
            await offsets_of(broker, 0, 10, retry_timeout_ms=300)


async def test_a_small_range_is_not_fetched_in_large_pieces() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 2_000)
        await offsets_of(broker, 0, 20)
        await offsets_of(broker, 0, 20_000)
        asked = [request.max_bytes for request in broker.seen(ApiKey.FETCH)]
        assert asked == [MIN_FETCH_BYTES, MAX_FETCH_BYTES]


async def test_what_was_deleted_is_an_error_or_skipped() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        broker.topics["t"][0].log_start_offset = 23
        with pytest.raises(DataLostError, match=r"offsets 0 to 22 of t-0 are gone, it begins at 23"):
            await offsets_of(broker, 0, 50)
        assert await offsets_of(broker, 0, 50, fails_on_data_loss=False) == [20, 30, 40]
        assert await offsets_of(broker, 0, 12, fails_on_data_loss=False) == []


async def test_a_log_that_ends_before_the_range_begins_was_made_anew() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 1)
        with pytest.raises(DataLostError, match="made anew"):
            await offsets_of(broker, 20, 30)
        assert await offsets_of(broker, 20, 30, fails_on_data_loss=False) == []


async def test_a_log_that_ends_within_the_range_is_waited_for_and_then_an_error() -> None:
    async with FakeBroker({"t": 1}) as broker:
        fill(broker, 2)
        with pytest.raises(DataLostError, match="t-0 ends at offset 20, where offsets up to 29 were seen"):
            await offsets_of(broker, 0, 30, retry_timeout_ms=100)
        assert await offsets_of(broker, 0, 30, fails_on_data_loss=False, retry_timeout_ms=100) == [0, 10]
