"""What a reader gets to see, from where, and what it does when a broker refuses."""

import asyncio
import random
from typing import Any

import pytest
from fake_broker import FakeBroker, Partition, hang_up

from semel.client.admin import READ_COMMITTED, READ_UNCOMMITTED
from semel.client.cluster import Cluster
from semel.client.consumer import BEGINNING, END, Consumer, ConsumerOptions, Start
from semel.client.metadata import TopicPartition
from semel.errors import FatalError, ProtocolError, RetriableError
from semel.wire.apis import ApiKey
from semel.wire.batch import InvalidBatch, read_header
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
)
from semel.wire.records import Record, build_batch, build_end_marker

HERE = TopicPartition("t", 0)


def add(partition: Partition, *values: bytes, producer_id: int = -1, timestamp: int = 0) -> None:
    """Appends a batch; with a producer id it is part of a transaction."""
    batch = build_batch(
        [Record(None, value, timestamp) for value in values],
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=0 if producer_id >= 0 else -1,
        transactional=producer_id >= 0,
    )
    partition.store(batch, read_header(batch))


def end(partition: Partition, producer_id: int, *, commit: bool) -> None:
    """Appends a transaction's end marker."""
    marker = build_end_marker(
        commit=commit,
        producer_id=producer_id,
        producer_epoch=0,
        coordinator_epoch=0,
        timestamp=0,
        base_offset=0,
        leader_epoch=0,
    )
    partition.store(marker, read_header(marker))


async def read(
    broker: FakeBroker,
    start: Start = BEGINNING,
    isolation_level: int = READ_UNCOMMITTED,
) -> list[tuple[int, bytes | None]]:
    """Offsets and values from there to the end, of partition 0."""
    options = ConsumerOptions(isolation_level=isolation_level)
    async with Cluster(broker.bootstrap) as cluster, Consumer(cluster, options) as consumer:
        await consumer.assign([HERE], start)
        (end_offset,) = (await consumer.end_offsets()).values()
        seen: list[tuple[int, bytes | None]] = []
        async with asyncio.timeout(10):
            while consumer.position(HERE) < end_offset:
                for batch in await consumer.poll(1000):
                    seen += [(record.offset, record.value) for record in batch.records()]
        return seen


async def test_everything_is_read_in_order() -> None:
    async with FakeBroker({"t": 1}) as broker:
        for number in range(10):
            add(broker.topics["t"][0], b"a%d" % number, b"b%d" % number)
        expected = [b"%c%d" % (letter, number) for number in range(10) for letter in b"ab"]
        assert await read(broker) == list(enumerate(expected))


async def test_reading_begins_in_the_middle_of_a_batch() -> None:
    async with FakeBroker({"t": 1}) as broker:
        add(broker.topics["t"][0], b"a", b"b", b"c")
        add(broker.topics["t"][0], b"d")
        assert await read(broker, Start(offset=2)) == [(2, b"c"), (3, b"d")]


async def test_reading_begins_at_a_time() -> None:
    async with FakeBroker({"t": 1}) as broker:
        for timestamp in (10, 20, 30):
            add(broker.topics["t"][0], b"%d" % timestamp, timestamp=timestamp)
        assert await read(broker, Start(timestamp_ms=15)) == [(1, b"20"), (2, b"30")]
        assert await read(broker, Start(timestamp_ms=31)) == []


async def test_reading_at_the_end_sees_only_what_comes_later() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        partition = broker.topics["t"][0]
        add(partition, b"old")
        async with Consumer(cluster) as consumer:
            await consumer.assign([HERE], END)
            assert await consumer.poll(30) == []
            add(partition, b"new")
            values: list[bytes | None] = []
            async with asyncio.timeout(10):
                while not values:
                    values = [
                        record.value for batch in await consumer.poll(1000) for record in batch.records()
                    ]
            assert values == [b"new"]


async def test_aborted_records_and_markers_are_not_shown_under_read_committed() -> None:
    async with FakeBroker({"t": 1}) as broker:
        partition = broker.topics["t"][0]
        add(partition, b"plain")  # 0
        add(partition, b"aborted-1", producer_id=1)  # 1
        add(partition, b"committed", producer_id=2)  # 2
        add(partition, b"aborted-2", producer_id=1)  # 3
        end(partition, 1, commit=False)  # 4
        add(partition, b"again", producer_id=1)  # 5
        end(partition, 2, commit=True)  # 6
        end(partition, 1, commit=True)  # 7
        partition.aborted = [AbortedTransaction(producer_id=1, first_offset=1)]
        shown = await read(broker, isolation_level=READ_COMMITTED)
        assert shown == [(0, b"plain"), (2, b"committed"), (5, b"again")]
        everything = await read(broker, isolation_level=READ_UNCOMMITTED)
        assert [offset for offset, _ in everything] == [0, 1, 2, 3, 5]


async def test_a_fetch_that_begins_inside_an_aborted_transaction_still_hides_it() -> None:
    async with FakeBroker({"t": 1}) as broker:
        partition = broker.topics["t"][0]
        add(partition, b"aborted-1", producer_id=1)
        add(partition, b"aborted-2", producer_id=1)
        end(partition, 1, commit=False)
        add(partition, b"after")
        partition.aborted = [AbortedTransaction(producer_id=1, first_offset=0)]
        assert await read(broker, Start(offset=1), READ_COMMITTED) == [(3, b"after")]


@pytest.mark.parametrize("seed", range(20))
async def test_random_transactions_are_shown_exactly_if_they_committed(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeBroker({"t": 1}) as broker:
        partition = broker.topics["t"][0]
        open_since: dict[int, list[int]] = {}
        committed: list[int] = []
        for _ in range(60):
            producer_id = rng.randrange(4)
            if producer_id in open_since and rng.random() < 0.3:
                commit = rng.random() < 0.5
                offsets = open_since.pop(producer_id)
                if commit:
                    committed += offsets
                else:
                    partition.aborted.append(
                        AbortedTransaction(producer_id=producer_id, first_offset=offsets[0])
                    )
                end(partition, producer_id, commit=commit)
            elif producer_id == 0:
                committed.append(partition.end_offset)
                add(partition, b"plain")
            else:
                open_since.setdefault(producer_id, []).append(partition.end_offset)
                add(partition, b"in a transaction", producer_id=producer_id)
        for producer_id, offsets in open_since.items():
            partition.aborted.append(AbortedTransaction(producer_id=producer_id, first_offset=offsets[0]))
            end(partition, producer_id, commit=False)
        rng.shuffle(partition.aborted)
        shown = await read(broker, isolation_level=READ_COMMITTED)
        assert [offset for offset, _ in shown] == sorted(committed), f"seed {seed}"


async def test_under_read_committed_the_end_is_the_last_stable_offset() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        add(broker.topics["t"][0], b"a", b"b", b"c")
        broker.topics["t"][0].last_stable_offset = 1
        async with Consumer(cluster, ConsumerOptions(isolation_level=READ_COMMITTED)) as consumer:
            await consumer.assign([HERE])
            assert await consumer.end_offsets() == {HERE: 1}


async def test_an_offset_that_the_log_does_not_have_is_an_error_that_says_what_it_has() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        add(broker.topics["t"][0], b"a", b"b")
        async with Consumer(cluster) as consumer:
            await consumer.assign([HERE], Start(offset=9))
            with pytest.raises(FatalError, match=r"t-0 cannot be read at offset 9.* offsets 0 to 1"):
                await consumer.poll(1000)


def refuse(code: int) -> Any:
    def answer(broker: FakeBroker, request: Any) -> FetchResponse:
        return FetchResponse(
            responses=[
                _refused_topic(topic.topic, [each.partition for each in topic.partitions], code)
                for topic in request.topics
            ]
        )

    return answer


def _refused_topic(name: str, partitions: list[int], code: int) -> FetchableTopicResponse:
    return FetchableTopicResponse(
        topic=name, partitions=[PartitionData(partition_index=each, error_code=code) for each in partitions]
    )


@pytest.mark.parametrize(
    "trick",
    [
        pytest.param(refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER), id="not the leader"),
        pytest.param(hang_up, id="the connection is lost"),
    ],
)
async def test_a_failure_that_passes_is_not_noticed(trick: Any) -> None:
    async with FakeBroker({"t": 1}) as broker:
        add(broker.topics["t"][0], b"a", b"b")
        broker.misbehave(ApiKey.FETCH, trick, trick)
        assert await read(broker) == [(0, b"a"), (1, b"b")]


async def test_a_failure_that_goes_on_is_raised_in_the_end() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.FETCH, *[refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 100)
        async with Consumer(cluster, ConsumerOptions(retry_timeout_ms=50)) as consumer:
            await consumer.assign([HERE])
            with pytest.raises(RetriableError, match="t-0 cannot be read at offset 0: NOT_LEADER"):
                async with asyncio.timeout(10):
                    while True:
                        await consumer.poll(100)


async def test_a_partial_batch_at_the_end_of_a_fetch_is_read_by_the_next() -> None:
    async with FakeBroker({"t": 1}) as broker:
        add(broker.topics["t"][0], b"a")
        add(broker.topics["t"][0], b"b" * 100)

        async def cut(fake: FakeBroker, request: Any) -> FetchResponse:
            response = await fake.fetch(request)
            answer = response.responses[0].partitions[0]
            answer.records = bytes(answer.records)[:-1]  # type: ignore[call-overload]
            return response

        broker.misbehave(ApiKey.FETCH, cut)
        assert await read(broker) == [(0, b"a"), (1, b"b" * 100)]
        assert [each.topics[0].partitions[0].fetch_offset for each in broker.seen(ApiKey.FETCH)][:2] == [0, 1]


async def test_bytes_without_a_whole_batch_are_an_error_and_no_endless_loop() -> None:
    async with FakeBroker({"t": 1}) as broker:
        add(broker.topics["t"][0], b"a" * 100)
        broker.topics["t"][0].batches[0] = broker.topics["t"][0].batches[0][:-1]
        with pytest.raises(ProtocolError, match="no whole batch"):
            await read(broker)


async def test_a_batch_that_was_damaged_on_the_way_is_refused() -> None:
    async with FakeBroker({"t": 1}) as broker:
        add(broker.topics["t"][0], b"value")
        broker.topics["t"][0].batches[0][-3] ^= 1
        with pytest.raises(InvalidBatch, match=r"CRC|checksum"):
            await read(broker)


async def test_a_topic_is_read_whole_with_every_partition_getting_its_turn() -> None:
    async with FakeBroker({"t": 5}) as broker, Cluster(broker.bootstrap) as cluster:
        for index, partition in enumerate(broker.topics["t"]):
            add(partition, b"p%d" % index)
        async with Consumer(cluster) as consumer:
            await consumer.assign(await consumer.partitions_of("t"))
            seen: set[tuple[int, bytes | None]] = set()
            async with asyncio.timeout(10):
                while len(seen) < 5:
                    for batch in await consumer.poll(1000):
                        seen |= {(batch.where.partition, record.value) for record in batch.records()}
            assert seen == {(index, b"p%d" % index) for index in range(5)}


async def test_records_are_not_lost_when_the_same_answer_also_brings_a_failure() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        add(broker.topics["t"][0], b"a")

        async def fail_the_other(fake: FakeBroker, request: Any) -> FetchResponse:
            response = await fake.fetch(request)
            response.responses[0].partitions[1].error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            broker.misbehave(ApiKey.METADATA, hang_up)
            return response

        async with Consumer(cluster) as consumer:
            await consumer.assign(await consumer.partitions_of("t"))
            broker.misbehave(ApiKey.FETCH, fail_the_other)
            (batch,) = await consumer.poll(1000)
            assert [record.value for record in batch.records()] == [b"a"]


async def test_a_batch_from_before_the_position_is_passed_over() -> None:
    async with FakeBroker({"t": 1}) as broker:
        for value in (b"a", b"b", b"c"):
            add(broker.topics["t"][0], value)

        async def send_older_ones_too(fake: FakeBroker, request: Any) -> FetchResponse:
            request.topics[0].partitions[0].fetch_offset = 0
            return await fake.fetch(request)

        broker.misbehave(ApiKey.FETCH, send_older_ones_too)
        async with Cluster(broker.bootstrap) as cluster, Consumer(cluster) as consumer:
            await consumer.assign([HERE], Start(offset=2))
            (batch,) = await consumer.poll(1000)
            assert [record.offset for record in batch.records()] == [2]
            assert consumer.position(HERE) == 3
