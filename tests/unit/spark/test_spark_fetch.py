"""Fetching a range: to its end, through failures, and never past what was asked for."""

import asyncio
from typing import Any, Final

import pytest
from fake_broker import FakeBroker, ThreadedBroker, hang_up

from semel.client.admin import READ_COMMITTED
from semel.client.cluster import Cluster
from semel.client.errors import UnreachableError
from semel.client.metadata import TopicPartition
from semel.spark.source_fetch import (
    MAX_FETCH_BYTES,
    MIN_FETCH_BYTES,
    RETRY_TIMEOUT_MS,
    DataLostError,
    RangeFetch,
)
from semel.spark.source_offsets import OffsetRange
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.messages.fetch import FetchableTopicResponse, FetchResponse
from semel.wire.records import Record, build_batch

WHERE = TopicPartition("t", 0)
BATCH_RECORDS = 10
# Far more than comes with one read of a socket.
LARGE_VALUE_BYTES = 20_000


def fill(broker: FakeBroker, batches: int, value_bytes: int = 50) -> None:
    for _ in range(batches):
        batch = build_batch([Record(None, b"x" * value_bytes, 0)] * BATCH_RECORDS)
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


# A task that Spark holds back: nobody runs the loop until the next batches are asked for


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward, which is how a pause looks to it."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


PAUSES_S: Final = pytest.mark.parametrize(
    "pause_s", [10.0, 40.0, 2 * RETRY_TIMEOUT_MS / 1000], ids=["short", "past a request", "past all retries"]
)


def offsets_with_pauses(
    broker: FakeBroker,
    end: int,
    pause_s: float,
    *,
    fails_on_data_loss: bool = True,
    retry_timeout_ms: int = RETRY_TIMEOUT_MS,
) -> list[int]:
    """The base offsets of what a task brings from the beginning, when each of its steps has to wait."""
    found: list[int] = []
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        cluster = Cluster(broker.bootstrap)

        async def open_range() -> RangeFetch:
            return RangeFetch(
                cluster,
                OffsetRange(WHERE, 0, end),
                isolation_level=READ_COMMITTED,
                fails_on_data_loss=fails_on_data_loss,
                retry_timeout_ms=retry_timeout_ms,
            )

        fetch = runner.run(open_range())
        try:
            while not fetch.is_done:
                found += [header.base_offset for header, _ in runner.run(fetch.next_batches())]
                loop.skipped_s += pause_s
        finally:
            runner.run(fetch.close())
            runner.run(cluster.close())
    return found


def nothing_yet(broker: FakeBroker, request: Any) -> Any:
    """The answer of a broker that lags behind the one that told where the range ends."""
    answer = broker.fetch_partition(WHERE.topic, WHERE.partition, 0, 0)
    answer.records = None
    return FetchResponse(responses=[FetchableTopicResponse(topic=WHERE.topic, partitions=[answer])])


@PAUSES_S
def test_a_task_may_be_held_back_for_any_time_while_the_next_fetch_is_under_way(pause_s: float) -> None:
    """What is late then is whoever should have read the answer, and not the broker: it is no failure."""
    with ThreadedBroker(FakeBroker({"t": 1})) as broker:
        fill(broker, 50, LARGE_VALUE_BYTES)
        assert offsets_with_pauses(broker, 500, pause_s, retry_timeout_ms=0) == list(range(0, 500, 10))
        assert len(broker.seen(ApiKey.FETCH)) > 2


@PAUSES_S
@pytest.mark.parametrize("fails_on_data_loss", [True, False], ids=["strict", "lenient"])
def test_an_empty_answer_after_a_pause_is_no_loss(pause_s: float, fails_on_data_loss: bool) -> None:
    with ThreadedBroker(FakeBroker({"t": 1})) as broker:
        fill(broker, 50, LARGE_VALUE_BYTES)
        broker.misbehave(ApiKey.FETCH, FakeBroker.handle, *[nothing_yet] * 3)
        found = offsets_with_pauses(broker, 500, pause_s, fails_on_data_loss=fails_on_data_loss)
        assert found == list(range(0, 500, 10))


@PAUSES_S
def test_a_broker_that_is_away_when_a_task_goes_on_is_waited_for(pause_s: float) -> None:
    with ThreadedBroker(FakeBroker({"t": 1})) as broker:
        fill(broker, 50, LARGE_VALUE_BYTES)
        broker.misbehave(ApiKey.FETCH, FakeBroker.handle, *[hang_up] * 4)
        assert offsets_with_pauses(broker, 500, pause_s) == list(range(0, 500, 10))
