"""Every record once and in order, whatever happens on the way."""

import asyncio
from typing import Any

import pytest
from fake_broker import FakeBroker, Silence, hang_up, lose_answer, stay_silent

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.metadata import TopicPartition
from semel.client.producer import PendingBatch, PendingRun, Producer, ProducerOptions
from semel.errors import ConfigError, FatalError, RetriableError
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.messages.produce import PartitionProduceResponse, ProduceResponse, TopicProduceResponse
from semel.wire.partitioner import partition_for_key
from semel.wire.records import Record, read_records

ONE_RECORD_BATCHES = ProducerOptions(linger_ms=0, batch_bytes=1)


def refuse(code: int) -> Any:
    def answer(broker: FakeBroker, request: Any) -> ProduceResponse:
        topic = request.topic_data[0]
        partition = PartitionProduceResponse(index=topic.partition_data[0].index, error_code=code)
        return ProduceResponse(
            responses=[TopicProduceResponse(name=topic.name, partition_responses=[partition])]
        )

    return answer


def numbered(count: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(count)]


async def send_all(producer: Producer, values: list[bytes | None]) -> None:
    for value in values:
        await producer.send("t", value)


async def test_records_arrive_in_order_with_offsets() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster) as producer:
            pending = [await producer.send("t", value) for value in numbered(100)]
            assert [await record for record in pending] == list(range(100))
        assert broker.topics["t"][0].values() == numbered(100)


async def test_records_are_gathered_into_batches() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ProducerOptions(linger_ms=1000, batch_bytes=1000)) as producer:
            await send_all(producer, [b"x" * 68] * 25)  # 100 bytes each with what a record takes besides
        counts = [read_header(batch).record_count for batch in broker.topics["t"][0].batches]
        assert counts == [10, 10, 5]


async def test_linger_sends_a_batch_that_does_not_fill() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = Producer(cluster, ProducerOptions(linger_ms=1))
        record = await producer.send("t", b"v")
        async with asyncio.timeout(5):
            assert await record == 0
        await producer.abandon()


async def test_key_value_headers_and_time_arrive_as_given() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ProducerOptions(codec=Codec.LZ4)) as producer:
            await producer.send(
                "t", None, key=b"k", timestamp_ms=12345, headers=[("h", b"\xff"), ("n", None)]
            )
        batch = broker.topics["t"][0].batches[0]
        assert read_header(batch).codec == Codec.LZ4
        (record,) = read_records(batch)
        assert (record.key, record.value, record.timestamp) == (b"k", None, 12345)
        assert list(record.headers) == [("h", b"\xff"), ("n", None)]


async def test_keys_choose_partitions_as_every_kafka_client_does() -> None:
    keys = [b"key-%d" % number for number in range(50)]
    async with FakeBroker({"t": 7}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster) as producer:
            for key in keys:
                await producer.send("t", key, key=key)
        for index, partition in enumerate(broker.topics["t"]):
            assert partition.values() == [key for key in keys if partition_for_key(key, 7) == index]


async def test_records_without_keys_fill_a_batch_before_they_move_on() -> None:
    async with FakeBroker({"t": 3}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ProducerOptions(linger_ms=1000, batch_bytes=350)) as producer:
            await send_all(producer, [b"xx"] * 60)  # 34 bytes each with what a record takes besides
        for partition in broker.topics["t"]:
            assert [read_header(batch).record_count for batch in partition.batches] == [10, 10]


async def test_many_at_once_are_told_of_in_runs_that_lie_one_after_the_other() -> None:
    keys = [None, None, b"d", b"d", None, None]
    assert partition_for_key(b"d", 2) == 1, "not the first, where those without a key begin"
    async with (
        FakeBroker({"t": 2}) as broker,
        Cluster(broker.bootstrap) as cluster,
        Producer(cluster) as producer,
    ):
        runs = await producer.send_many("t", [Record(key, b"v") for key in keys])
        found = [(run.where.partition, list(run.offsets(await run))) for run in runs]
        assert await producer.send_many("t", []) == []
    assert found == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3])]


async def test_who_is_cancelled_while_it_waits_takes_nothing_from_others() -> None:
    batch = PendingBatch(TopicPartition("t", 0), 0.0, asyncio.get_running_loop().create_future())
    cancelled, other = (asyncio.ensure_future(batch.wait()) for _ in range(2))
    cancelled.cancel()
    batch.succeed(7)
    assert (await other, await batch.wait(), cancelled.cancelled()) == (7, 7, True)


async def test_what_another_sent_in_between_ends_a_run() -> None:
    """Whoever waits for room may find others' records behind its own."""
    batch = PendingBatch(TopicPartition("t", 0), 0.0, asyncio.get_running_loop().create_future())
    batch.records.append(Record(None, b"mine"))
    run = PendingRun(batch, 0, 1)
    batch.records += [Record(None, b"mine"), Record(None, b"mine")]
    assert run.goes_on(batch, 2)
    batch.records += [Record(None, b"another's"), Record(None, b"mine")]
    assert not run.goes_on(batch, 1)
    batch.succeed(7)
    assert list(run.offsets(await run)) == [7, 8, 9]


async def test_many_records_fill_batches_to_the_limit_and_lie_in_order() -> None:
    """Some without a key, some with; the largest fits in no batch with others."""
    options = ProducerOptions(batch_bytes=600, linger_ms=0)
    sizes = [10, 150, 90, 200, 1_000, 30, 30, 400, 5, 5, 5, 300, 300, 10]
    given = [Record(b"k" if n % 5 == 4 else None, b"%d:" % n + b"v" * size) for n, size in enumerate(sizes)]
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, options) as producer:
            runs = await producer.send_many("t", given)
            found = [offset for run in runs for offset in run.offsets(await run)]
        assert found == list(range(len(given)))
        assert broker.topics["t"][0].values() == [record.value for record in given]
        batches = [read_header(batch) for batch in broker.topics["t"][0].batches]
        assert 1 in [header.record_count for header in batches]
        assert all(header.size <= 600 or header.record_count == 1 for header in batches)


async def test_a_partition_that_does_not_exist_is_refused() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster) as producer:
            with pytest.raises(ConfigError, match="no partition 2: it has 0 to 1"):
                await producer.send("t", b"v", partition=2)
            await producer.send("t", b"v", partition=1)
        assert broker.topics["t"][1].values() == [b"v"]


async def test_at_most_five_batches_are_in_flight() -> None:
    release = asyncio.Event()

    async def hold(broker: FakeBroker, request: Any) -> Any:
        await release.wait()
        return broker.handle(request)

    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = Producer(cluster, ONE_RECORD_BATCHES)
        await (await producer.send("t", b"first"))
        broker.misbehave(ApiKey.PRODUCE, hold)
        await send_all(producer, numbered(20))
        await broker.heard(ApiKey.PRODUCE, count=2)
        (queue,) = producer._queues.values()
        assert len(queue.window) == 5
        assert len(queue.sealed) == 15
        release.set()
        await producer.close()
        assert broker.topics["t"][0].values() == [b"first", *numbered(20)]


async def test_the_first_batch_of_a_partition_travels_alone() -> None:
    release = asyncio.Event()

    async def hold(broker: FakeBroker, request: Any) -> Any:
        await release.wait()
        return broker.handle(request)

    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.PRODUCE, hold)
        producer = Producer(cluster, ONE_RECORD_BATCHES)
        await send_all(producer, numbered(20))
        await broker.heard(ApiKey.PRODUCE)
        (queue,) = producer._queues.values()
        assert len(queue.window) == 1
        release.set()
        await producer.close()
        assert broker.topics["t"][0].values() == numbered(20)


@pytest.mark.parametrize(
    "tricks",
    [
        pytest.param([lose_answer], id="the answer is lost"),
        pytest.param([hang_up], id="the request is lost"),
        pytest.param([refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)], id="not the leader"),
        pytest.param([refuse(ErrorCode.NOT_ENOUGH_REPLICAS)] * 3, id="refused three times"),
        pytest.param([FakeBroker.handle, FakeBroker.handle, lose_answer], id="the third answer is lost"),
        pytest.param([FakeBroker.handle, hang_up, lose_answer, hang_up], id="one failure after the other"),
    ],
)
async def test_a_failure_that_passes_loses_doubles_and_reorders_nothing(tricks: list[Any]) -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ONE_RECORD_BATCHES) as producer:
            broker.misbehave(ApiKey.PRODUCE, *tricks)
            pending = [await producer.send("t", value) for value in numbered(30)]
            offsets = [await record for record in pending]
        assert broker.topics["t"][0].values() == numbered(30)
        assert offsets == list(range(30))


async def test_a_broker_that_stops_answering_is_asked_again() -> None:
    options = ConnectionOptions(request_timeout_ms=100)
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap, options) as cluster:
        broker.misbehave(ApiKey.PRODUCE, stay_silent)
        async with Producer(cluster, ONE_RECORD_BATCHES) as producer:
            await send_all(producer, numbered(8))
        assert broker.topics["t"][0].values() == numbered(8)


async def test_a_duplicate_that_the_broker_reports_as_such_is_a_success() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.PRODUCE, refuse(ErrorCode.DUPLICATE_SEQUENCE_NUMBER))
        async with Producer(cluster, ONE_RECORD_BATCHES) as producer:
            assert await (await producer.send("t", b"v")) == -1


async def test_a_refusal_for_good_fails_the_record_the_flush_and_every_later_send() -> None:
    async with FakeBroker({"t": 1, "u": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = Producer(cluster, ONE_RECORD_BATCHES)
        broker.misbehave(ApiKey.PRODUCE, refuse(ErrorCode.MESSAGE_TOO_LARGE))
        record = await producer.send("t", b"v")
        with pytest.raises(FatalError, match="MESSAGE_TOO_LARGE"):
            await record
        with pytest.raises(FatalError, match="MESSAGE_TOO_LARGE"):
            await producer.send("u", b"v")
        with pytest.raises(FatalError, match="MESSAGE_TOO_LARGE"):
            await producer.close()


async def test_a_gap_in_the_sequence_is_never_papered_over() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = Producer(cluster, ONE_RECORD_BATCHES)
        broker.misbehave(ApiKey.PRODUCE, refuse(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER))
        with pytest.raises(FatalError, match="OUT_OF_ORDER"):
            await (await producer.send("t", b"v"))
        await producer.abandon()


async def test_records_that_cannot_be_delivered_in_time_fail_and_say_that_they_may_be_there() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = Producer(cluster, ProducerOptions(linger_ms=0, delivery_timeout_ms=100))
        broker.misbehave(ApiKey.PRODUCE, *[refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 50)
        record = await producer.send("t", b"v")
        with pytest.raises(FatalError, match=r"within 100 ms; they may or may not be in the log.*NOT_LEADER"):
            await record
        await producer.abandon()


async def test_sending_waits_while_the_buffer_is_full() -> None:
    release = asyncio.Event()

    async def hold(broker: FakeBroker, request: Any) -> Any:
        await release.wait()
        return broker.handle(request)

    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.PRODUCE, hold)
        producer = Producer(cluster, ProducerOptions(linger_ms=0, buffer_bytes=300))
        sending = asyncio.create_task(send_all(producer, [b"x" * 68] * 10))
        done, _ = await asyncio.wait([sending], timeout=0.1)
        assert not done
        assert producer._buffered_bytes <= 400
        release.set()
        await sending
        await producer.close()
        assert len(broker.topics["t"][0].values()) == 10


async def test_without_acks_nothing_is_waited_for() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ProducerOptions(acks=0, linger_ms=0)) as producer:
            assert await (await producer.send("t", b"v")) == -1
        await broker.heard(ApiKey.PRODUCE)
        assert broker.topics["t"][0].values() == [b"v"]
        assert read_header(broker.topics["t"][0].batches[0]).producer_id == -1


async def test_an_unknown_topic_fails_the_send() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster, Producer(cluster) as producer:
        with pytest.raises(RetriableError, match="'nope' cannot be used"):
            await producer.send("nope", b"v")


async def test_abandoning_does_not_wait_and_fails_what_is_open() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.PRODUCE, lambda _broker, _request: Silence())
        producer = Producer(cluster, ProducerOptions(linger_ms=0))
        record = await producer.send("t", b"v")
        async with asyncio.timeout(5):
            await producer.abandon()
        with pytest.raises(FatalError, match="closed before"):
            await record


async def test_sequences_run_on_per_partition() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        async with Producer(cluster, ONE_RECORD_BATCHES) as producer:
            for number in range(6):
                await producer.send("t", b"v", partition=number % 2)
        for partition in broker.topics["t"]:
            headers = [read_header(batch) for batch in partition.batches]
            assert [header.base_sequence for header in headers] == [0, 1, 2]
            assert len({header.producer_id for header in headers}) == 1
