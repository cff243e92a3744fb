"""The Kafka sink's claims, on Semel and on Apache Kafka."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from broker_process import StartBroker
from kafka_process import KafkaProcess
from transaction_cases import make_topic, read_committed, read_values, settle

from semel.client.admin import (
    BROKER_RESOURCE,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    SET_CONFIG,
    Admin,
    config_value,
)
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.errors import check
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction, TransactionOptions
from semel.errors import ConfigError
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    FencedOut,
    InitFailed,
    MarkerMismatch,
    WriteFailed,
)
from semel.sinks.kafka import KafkaSink
from semel.sinks.kafka.markers import MarkerStore, transactional_id_of
from semel.sinks.marker import NO_MARKER, Owner
from semel.sinks.receipts import NO_ORIGIN, Origin, Receipt
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import Rows, State, WriterPlan
from semel.sinks.source_group import SourceOffsets, source_group_of
from semel.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from semel.wire.partitioner import partition_for_key
from semel.wire.records import Record

PARTITIONS = 4
POLL_MS = 1_000


async def write_epoch(sink: KafkaSink, epoch: int, rows: Rows, origin: Origin = NO_ORIGIN) -> Receipt | None:
    """One epoch by one writer; None if it was there already."""
    if await sink.begin(epoch, origin) is None:
        return None
    writer = sink.writer()
    await writer.write(rows)
    receipt = await writer.finish()
    await sink.commit(epoch, [receipt])
    return receipt


async def read_records(cluster: Cluster, topic: str) -> dict[int, list[Record]]:
    """What is committed, by partition."""
    await settle(cluster, topic)
    records: dict[int, list[Record]] = {}
    async with Consumer(cluster, ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=50)) as consumer:
        await consumer.assign(await consumer.partitions_of(topic))
        ends = await consumer.end_offsets()
        while any(consumer.position(where) < end for where, end in ends.items()):
            for batch in await consumer.poll(POLL_MS):
                records.setdefault(batch.where.partition, []).extend(batch.records())
    return records


async def add_partitions(cluster: Cluster, topic: str, count: int) -> None:
    """The topic has so many from here on."""
    await Admin(cluster).create_partitions(topic, count)
    while len((await Admin(cluster).describe_topic(topic)).partitions) < count:
        pass  # it is done, and brokers hear of it


def values(numbers: Sequence[int]) -> list[Mapping[str, object]]:
    return [{"key": b"key %d" % number, "value": b"%d" % number} for number in numbers]


def flat(partitions: list[list[bytes | None]]) -> list[bytes | None]:
    return sorted(value for partition in partitions for value in partition)  # type: ignore[type-var]


# Epochs


async def test_a_committed_epoch_is_visible_whole_and_an_aborted_one_not_at_all(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) is None
        await write_epoch(sink, 0, values(range(100)))
        assert await sink.begin(1) is not None
        writer = sink.writer()
        await writer.write(values(range(100, 200)))
        await writer.finish()
        assert len(flat(await read_values(cluster, topic, READ_UNCOMMITTED))) == 200
        await sink.abort(1)
        await write_epoch(sink, 1, values(range(200, 300)))
        assert sink.metrics.commits == 2
        assert sink.metrics.aborts == 1
        assert sink.metrics.rows == 200
        assert sink.metrics.buffered_rows == 0
        assert sink.tracker.last_committed == 1
    wanted = sorted(b"%d" % number for number in [*range(100), *range(200, 300)])
    assert flat(await read_committed(cluster, topic)) == wanted


async def test_an_epoch_that_the_marker_has_is_skipped_by_the_next_owner(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    origin = Origin("query", "digest")
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await write_epoch(sink, 0, values(range(10)), origin)
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) == 0
        assert await write_epoch(sink, 0, values(range(10)), origin) is None
        assert sink.metrics.skips == 1
        with pytest.raises(MarkerMismatch, match="other source offsets"):
            await sink.begin(0, Origin("query", "another digest"))
        with pytest.raises(MarkerMismatch, match="of another query"):
            await sink.begin(1, Origin("another query", "digest"))
        with pytest.raises(MarkerMismatch, match="never committed here"):
            await sink.begin(2, Origin("query", "digest"))
        await write_epoch(sink, 1, values(range(10, 20)), Origin("query", "next"))
    assert flat(await read_committed(cluster, topic)) == sorted(b"%d" % number for number in range(20))


async def test_an_empty_epoch_moves_the_marker(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        for epoch in range(3):
            assert await sink.begin(epoch) is not None
            await sink.commit(epoch, [])
        assert await sink.begin(3) is not None
        await sink.abort(3)  # nothing was written: there is nothing to end, or an empty transaction
        assert await sink.begin(3) is not None
        await sink.commit(3, [await sink.writer().finish()])
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) == 3


async def test_the_older_of_two_owners_stops_and_is_told_who_fenced_it(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with KafkaSink(bootstrap, topic) as older, KafkaSink(bootstrap, topic) as newer:
        await older.open(sink_id)
        assert await older.begin(0) is not None
        writer = older.writer()
        await writer.write(values(range(10)))
        receipt = await writer.finish()
        await newer.open(sink_id)
        with pytest.raises(FencedOut, match=f"was fenced by process .* \\(run {newer.run}, since "):
            await older.commit(0, [receipt])
        assert older.state is State.FAILED
        for again in (older.open(sink_id), older.begin(0), older.abort(0)):
            with pytest.raises(FencedOut, match=newer.run):
                await again
        await write_epoch(newer, 0, values(range(10, 20)))
    assert flat(await read_committed(cluster, topic)) == sorted(b"%d" % number for number in range(10, 20))


async def test_who_cannot_listen_for_its_writers_fences_nobody(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with KafkaSink(bootstrap, topic) as older, KafkaSink(bootstrap, topic) as newer:
        await older.open(sink_id)
        newer.share("192.0.2.1")  # an address for documents, of no machine
        with pytest.raises(InitFailed, match="cannot listen at '192"):
            await newer.open(sink_id)
        await write_epoch(older, 0, values(range(10)))
    assert flat(await read_committed(cluster, topic)) == sorted(b"%d" % number for number in range(10))


async def test_a_writer_whose_owner_was_fenced_says_by_whom(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as older, KafkaSink(bootstrap, topic) as newer:
        await older.open(sink_id)
        await older.begin(0)
        writer = older.writer()
        await writer.write(values(range(10)))
        await newer.open(sink_id)
        with pytest.raises(FencedOut, match=newer.run):
            await writer.finish()
        await writer.cancel()
    assert await read_committed(cluster, topic) == [[]]


async def test_a_hook_vetoes_an_epoch_which_can_then_be_aborted(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)

    def veto(epoch: int) -> None:
        if epoch == 0:
            raise ValueError("too few rows")

    async with KafkaSink(bootstrap, topic, settings=SinkSettings(before_commit=(veto,))) as sink:
        await sink.open(sink_id)
        with pytest.raises(CommitFailed, match="vetoed epoch 0: too few rows"):
            await write_epoch(sink, 0, values([1]))
        await sink.abort(0)
    assert await read_committed(cluster, topic) == [[]]


# Writers


async def test_keys_go_where_kafka_puts_them_and_rows_keep_their_order(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    keys = [dice.randbytes(dice.randrange(0, 40)) for _ in range(2_000)]
    rows = [{"key": key, "value": b"%d" % number} for number, key in enumerate(keys)]
    async with KafkaSink(bootstrap, topic, compression="lz4") as sink:
        await sink.open(sink_id)
        receipt = await write_epoch(sink, 0, rows)
    wanted: dict[int, list[tuple[bytes, bytes]]] = {}
    for number, key in enumerate(keys):
        wanted.setdefault(partition_for_key(key, PARTITIONS), []).append((key, b"%d" % number))
    found = await read_records(cluster, topic)
    assert {where: [(each.key, each.value) for each in records] for where, records in found.items()} == wanted
    assert receipt is not None
    assert receipt.parts == {f"{topic}-{where}": len(records) for where, records in wanted.items()}
    assert receipt.rows == 2_000


async def test_all_parts_of_a_record_come_from_columns(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    other = f"{topic}-other"
    await make_topic(cluster, topic, PARTITIONS)
    await make_topic(cluster, other, PARTITIONS)
    batch = pa.record_batch(
        {
            "k": pa.array(["a", None, "c"], pa.string()).dictionary_encode(),
            "v": pa.array([None, b"two", b"three"], pa.large_binary()),
            "h": pa.array(
                [[("x", b"1"), ("y", None)], None, []],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
            "where": pa.array([topic, other, topic], pa.large_string()),
            "p": pa.array([3, 1, 3], pa.int32()),
            "t": pa.array([1_000_000, 2_000_000, None], pa.timestamp("us", "UTC")),
        }
    )
    sink = KafkaSink(
        bootstrap,
        topic,
        key="k",
        value="v",
        headers="h",
        topic_column="where",
        partition_column="p",
        timestamp_column="t",
    )
    async with sink:
        await sink.open(sink_id)
        await write_epoch(sink, 0, batch)
    first, last = (await read_records(cluster, topic))[3]
    assert (first.key, first.value, first.timestamp, list(first.headers)) == (
        b"a",
        None,
        1_000,
        [("x", b"1"), ("y", None)],
    )
    assert (last.key, last.value, list(last.headers)) == (b"c", b"three", [])
    assert last.timestamp > 1_600_000_000_000
    (only,) = (await read_records(cluster, other))[1]
    assert (only.key, only.value, only.timestamp) == (None, b"two", 2_000)


async def test_a_key_has_one_place_in_an_epoch_though_partitions_are_added_to_a_topic_that_rows_name(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    named = f"{topic}-named"
    await make_topic(cluster, topic)
    await make_topic(cluster, named, 2)
    rows = [{"key": b"%d" % n, "value": b"%d" % n, "topic": named} for n in range(50)]
    async with KafkaSink(bootstrap, topic, topic_column="topic") as sink:
        sink.share()
        await sink.open(sink_id)
        plan = await sink.begin(0)
        assert plan is not None
        elsewhere = pickle.loads(pickle.dumps(plan))
        receipts = []
        for task, each in enumerate((plan, elsewhere, plan)):
            writer = each.writer(task, tasks=3)
            await writer.write(rows)
            receipts.append(await writer.finish())
            if task == 0:
                await add_partitions(cluster, named, 7)
        await sink.commit(0, receipts)
    found = await read_records(cluster, named)
    assert {where: len(records) for where, records in found.items()} == Counter(
        partition_for_key(b"%d" % n, 2) for n in [*range(50)] * 3
    )


async def test_partitions_that_are_added_are_written_to_from_the_next_epoch_on(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    """By key, and by rows that name them: those are good rows, and no start is needed for them."""
    named = f"{topic}-named"
    for each in (topic, named):
        await make_topic(cluster, each, 1)
    async with KafkaSink(bootstrap, topic, topic_column="topic", partition_column="partition") as sink:
        await sink.open(sink_id)
        for epoch, where in enumerate((0, 2)):
            plan = await sink.begin(epoch)
            assert plan is not None
            writer = plan.writer(0)
            await writer.write([{"key": None, "value": b"at", "topic": named, "partition": where}])
            by_key = [{"key": b"%d" % n, "value": b"", "topic": topic, "partition": None} for n in range(50)]
            await writer.write(by_key)
            await sink.commit(epoch, [await writer.finish()])
            for each in (topic, named):
                await add_partitions(cluster, each, 3 + epoch)
    assert {where for where, records in (await read_records(cluster, named)).items() if records} == {0, 2}
    found = await read_records(cluster, topic)
    expected = Counter([0] * 50) + Counter(partition_for_key(b"%d" % n, 3) for n in range(50))
    assert Counter({where: len(records) for where, records in found.items()}) == expected


async def test_rows_without_keys_go_to_the_partitions_of_their_task(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, 3)
    async with KafkaSink(bootstrap, topic, key=None) as sink:
        await sink.open(sink_id)
        plan = await sink.begin(0)
        assert plan is not None
        receipts = []
        for task in range(2):
            writer = plan.writer(task, tasks=2)
            await writer.write([{"value": b"%d" % task}] * 10)
            receipts.append(await writer.finish())
        await sink.commit(0, receipts)
        plan = await sink.begin(1)
        assert plan is not None
        with pytest.raises(WriteFailed, match="coalesce to 3 tasks"):
            writer = plan.writer(3, tasks=4)
            await writer.write([{"value": b"x"}])
            await writer.finish()
    partitions = await read_committed(cluster, topic)
    assert set(partitions[1]) == {b"1"}
    assert set(partitions[0] + partitions[2]) == {b"0"}


async def test_reaching_max_buffered_flushes_inside_the_transaction(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic, settings=SinkSettings(max_buffered=10)) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        writer = sink.writer()
        await writer.write(values(range(9)))
        assert sink.metrics.buffered_rows == 9
        assert await read_values(cluster, topic, READ_UNCOMMITTED) == [[]]
        await writer.write(values([9]))
        assert sink.metrics.buffered_rows == 0
        assert len((await read_values(cluster, topic, READ_UNCOMMITTED))[0]) == 10
        await sink.commit(0, [await writer.finish()])
    assert await read_committed(cluster, topic) == [[b"%d" % number for number in range(10)]]


async def test_batches_keep_below_max_message_bytes_and_an_oversize_row_is_named(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await Admin(cluster).create_topic(topic, partitions=1, configs={"max.message.bytes": "2000"})
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await write_epoch(sink, 0, [{"key": b"k", "value": b"x" * 500}] * 20)
        await sink.begin(1)
        writer = sink.writer()
        await writer.write([*values(range(3)), {"key": b"large", "value": b"x" * 2_000}])
        with pytest.raises(
            WriteFailed, match=r"row 3 \(key 'large'\) .* max.message.bytes is 2000"
        ) as failure:
            await writer.finish()
        assert failure.value.is_permanent
        await writer.cancel()
        await sink.abort(1)
    assert await read_committed(cluster, topic) == [[b"x" * 500] * 20]


@pytest.mark.parametrize(
    ("configs", "row", "refusal"),
    [
        ({"cleanup.policy": "compact"}, {"key": None, "value": b"v"}, "INVALID_RECORD"),
        (
            {"message.timestamp.after.max.ms": "3600000"},
            {"key": b"k", "value": b"v", "at": 2**43},
            "INVALID_TIMESTAMP",
        ),
    ],
    ids=["a compacted topic wants keys", "too far in the future"],
)
async def test_rows_that_the_broker_refuses_fail_for_good(
    bootstrap: str,
    cluster: Cluster,
    topic: str,
    sink_id: str,
    configs: dict[str, str],
    row: dict[str, object],
    refusal: str,
) -> None:
    await Admin(cluster).create_topic(topic, partitions=1, configs=configs)
    at = "at" if "at" in row else None
    async with KafkaSink(bootstrap, topic, timestamp_column=at) as sink:
        await sink.open(sink_id)
        with pytest.raises(WriteFailed, match=f"cannot be written.*{refusal}") as refused:
            await write_epoch(sink, 0, [row])
        assert refused.value.is_permanent
        await sink.abort(0)
        await write_epoch(sink, 0, [{"key": b"k", "value": b"good", "at": 2**40}])
    assert await read_committed(cluster, topic) == [[b"good"]]


async def test_bad_rows_become_dead_letters_in_the_same_transaction(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    dead = f"{topic}-dead"
    await Admin(cluster).create_topic(topic, partitions=2, configs={"max.message.bytes": "3000"})
    await Admin(cluster).create_topic(dead, partitions=1, configs={"max.message.bytes": "6000"})
    rows = [
        {"key": b"a", "value": b"good", "topic": topic, "partition": 0},
        {"key": b"b", "value": b"no topic", "topic": None, "partition": 0},
        {"key": b"c", "value": b"nowhere", "topic": topic, "partition": 7},
        {"key": b"d", "value": b"x" * 3_500, "topic": topic, "partition": 0},
        {"key": b"e", "value": b"x" * 9_000, "topic": topic, "partition": 0},
        {"key": b"f", "value": b"unknown", "topic": f"{topic}-unknown", "partition": 0},
        {"key": b"g", "value": b"good, too", "topic": topic, "partition": 1},
    ]
    sink = KafkaSink(
        bootstrap,
        topic,
        topic_column="topic",
        partition_column="partition",
        dead_letter_topic=dead,
        settings=SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER),
    )
    async with sink:
        await sink.open(sink_id)
        receipt = await write_epoch(sink, 0, rows)
        assert receipt is not None
        assert (receipt.rows, receipt.dead_letters) == (2, 5)
        await sink.begin(1)
        writer = sink.writer()
        await writer.write(rows)
        await writer.finish()
        await sink.abort(1)
    assert await read_committed(cluster, topic) == [[b"good"], [b"good, too"]]
    letters = {each.key: each for each in (await read_records(cluster, dead))[0]}
    assert {key: each.value for key, each in letters.items()} == {
        b"b": b"no topic",
        b"c": b"nowhere",
        b"d": b"x" * 3_500,
        b"e": None,
        b"f": b"unknown",
    }
    reasons = {key: dict(each.headers)["semel.reason"] for key, each in letters.items()}
    assert reasons[b"b"] == b"its topic is null"
    assert reasons[b"c"] == b"it is for partition 7, and there are 2"
    assert (reasons[b"d"] or b"").startswith(b"as a record it takes 35")
    assert reasons[b"f"] == f"there is no topic '{topic}-unknown'".encode()
    assert dict(letters[b"e"].headers)["semel.value.bytes"] == b"9000"
    assert dict(letters[b"c"].headers)["semel.row"] == b"2"


async def test_a_wrong_type_and_a_missing_column_are_named(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        for rows, message in (
            ([{"key": b"k"}], "no column 'value' for the record's value; the rows have key"),
            ([{"key": 1, "value": b"v"}], "column 'key' is of type int64"),
            ([{"key": b"k", "value": 1}, {"key": b"k", "value": b"v"}], "could not be read as columns"),
        ):
            writer = sink.writer()
            with pytest.raises(WriteFailed, match=message):
                await writer.write(rows)
                await writer.finish()
            await writer.cancel()
        await sink.abort(0)
    assert await read_committed(cluster, topic) == [[]]


# Claims


async def test_writers_take_turns_at_the_partitions_that_rows_name_by_their_keys(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    """Six tasks, some elsewhere, each with rows for all three partitions, in many small flushes."""
    await make_topic(cluster, topic, 3)
    sink = KafkaSink(bootstrap, topic, settings=SinkSettings(max_buffered=20))
    sink.share()
    async with sink:
        await sink.open(sink_id)
        for epoch in range(2):
            plan = await sink.begin(epoch)
            assert plan is not None
            elsewhere = pickle.loads(pickle.dumps(plan))

            async def write(task: int, plan: WriterPlan = plan, elsewhere: WriterPlan = elsewhere) -> Receipt:
                writer = (plan if task % 2 else elsewhere).writer(task, tasks=6)
                for start in range(0, 100, 10):
                    numbers = range(task * 100 + start, task * 100 + start + 10)
                    await writer.write([{"key": b"%d" % n, "value": b"%d" % n} for n in numbers])
                return await writer.finish()

            receipts = await asyncio.gather(*(write(task) for task in range(6)))
            assert sum(receipt.rows for receipt in receipts) == 600
            await sink.commit(epoch, receipts)
    found = await read_committed(cluster, topic)
    for partition, got in enumerate(found):
        expected = [b"%d" % n for n in range(600) if partition_for_key(b"%d" % n, 3) == partition]
        assert sorted(got) == sorted(expected * 2)
        # Rows of one task keep their order.
        for task in range(6):
            of_task = [int(value) for value in got if int(value) // 100 == task]
            assert of_task == sorted(of_task[: len(of_task) // 2]) * 2


async def test_two_tasks_with_rows_for_a_partition_that_one_keeps_spoil_the_epoch(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic, key=None) as sink:
        await sink.open(sink_id)
        plan = await sink.begin(0)
        assert plan is not None
        first, second = plan.writer(0), plan.writer(1)  # neither knows of the other
        await first.write(values(range(10)))
        receipt = await first.finish()
        await second.write(values(range(10, 20)))
        with pytest.raises(WriteFailed, match=f"has rows for {topic}-0, which another keeps"):
            await second.finish()
        with pytest.raises(CommitFailed, match="which another keeps"):
            await sink.commit(0, [receipt])
        await sink.abort(0)
        await write_epoch(sink, 0, values(range(5)))
    assert await read_committed(cluster, topic) == [[b"%d" % number for number in range(5)]]


async def test_a_second_attempt_at_a_task_spoils_the_epoch_even_elsewhere(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, 2)
    async with KafkaSink(bootstrap, topic, key=None, partition_column="partition") as sink:
        await sink.open(sink_id)
        plan = await sink.begin(0)
        assert plan is not None
        lost = plan.writer(0)
        await lost.write([{"value": b"lost", "partition": 0}])
        await lost.finish()
        retry = plan.writer(0)
        await retry.write([{"value": b"retry", "partition": 1}])
        with pytest.raises(WriteFailed, match="task 0 was tried twice"):
            await retry.finish()
        with pytest.raises(CommitFailed, match="tried twice"):
            await sink.commit(0, [])
        await sink.abort(0)
    assert await read_committed(cluster, topic) == [[], []]


async def test_rows_that_no_receipt_counts_are_not_committed(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        writer = sink.writer()
        await writer.write(values(range(3)))
        await writer.finish()
        with pytest.raises(CommitFailed, match=f"task 0 has written to {topic}-0 and gave no receipt"):
            await sink.commit(0, [])
        await sink.abort(0)
    assert await read_committed(cluster, topic) == [[]]


async def test_a_late_writer_of_an_aborted_epoch_can_write_nothing(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        late = sink.writer()
        await late.write(values(range(3)))
        unclaimed = sink.writer(1)
        await unclaimed.write(values(range(3)))
        await sink.abort(0)
        await sink.begin(0)
        with pytest.raises(WriteFailed, match="which is over"):
            await unclaimed.finish()
        with pytest.raises(WriteFailed, match="which is over"):
            await late.finish()
        await sink.commit(0, [])
    assert await read_committed(cluster, topic) == [[]]


async def test_a_plan_leaves_the_process_only_if_the_sink_is_shared(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as alone:
        await alone.open(sink_id)
        plan = await alone.begin(0)
        with pytest.raises(ConfigError, match=r"`share\(\)` before `open`"):
            pickle.dumps(plan)
    async with KafkaSink(bootstrap, topic) as shared:
        with pytest.raises(ConfigError, match="that writers can reach"):
            shared.share("0.0.0.0")
        shared.share()
        await shared.open(sink_id)
        plan = pickle.loads(pickle.dumps(await shared.begin(0)))
        writer = plan.writer(0)
        await writer.write(values(range(3)))
        receipt = pickle.loads(pickle.dumps(await writer.finish()))
        again = plan.writer(0)
        await again.write(values(range(3)))
        with pytest.raises(WriteFailed, match="tried twice"):
            await again.finish()
        await shared.abort(0)
        plan = pickle.loads(pickle.dumps(await shared.begin(0)))
        writer = plan.writer(0)
        await writer.write(values(range(3)))
        receipt = pickle.loads(pickle.dumps(await writer.finish()))
        await shared.commit(0, [receipt])
    assert await read_committed(cluster, topic) == [[b"0", b"1", b"2"]]


# Offsets of the source


async def test_source_offsets_of_the_same_cluster_are_committed_with_the_epoch(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    source = f"{topic}-source"
    await make_topic(cluster, topic)
    await make_topic(cluster, source, 2)
    offsets = SourceOffsets(bootstrap.replace("127.0.0.1", "localhost"), {source: {0: 5, 1: 7}})
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        await sink.commit(0, [], offsets)
    found = await fetch_offsets(
        cluster, source_group_of(sink_id), [TopicPartition(source, 0), TopicPartition(source, 1)]
    )
    assert {where.partition: committed.offset for where, committed in found.items()} == {0: 5, 1: 7}


async def test_an_application_whose_group_is_called_as_the_sink_is_goes_on_where_it_was(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(sink_id), {where: CommittedOffset(5)})
    offsets = SourceOffsets(bootstrap, {topic: {0: 900}})
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        await sink.commit(0, [], offsets)
    assert (await fetch_offsets(cluster, source_group_of(sink_id), [where]))[where].offset == 900
    assert (await fetch_offsets(cluster, sink_id, [where]))[where].offset == 5


async def test_source_offsets_of_another_cluster_are_committed_afterwards(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, start_broker: StartBroker
) -> None:
    source = start_broker()
    await make_topic(cluster, topic)
    async with Cluster(source.bootstrap) as elsewhere:
        await make_topic(elsewhere, "source")
        async with KafkaSink(bootstrap, topic) as sink:
            await sink.open(sink_id)
            await sink.begin(0)
            await sink.commit(0, [], SourceOffsets(source.bootstrap, {"source": {0: 5}}))
        where = TopicPartition("source", 0)
        assert (await fetch_offsets(elsewhere, source_group_of(sink_id), [where]))[where].offset == 5


# Opening


async def test_a_missing_topic_and_a_timeout_above_the_brokers_are_refused(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    with pytest.raises(InitFailed, match=f"topic '{topic}'"):
        await KafkaSink(bootstrap, topic).open(sink_id)
    await make_topic(cluster, topic)
    with pytest.raises(InitFailed, match=r"transaction_timeout is 100000 s, .* at most [0-9]+ s "):
        await KafkaSink(bootstrap, topic, transaction_timeout=100_000).open(sink_id)


async def test_without_fence_on_open_an_open_transaction_is_left_alone(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    gentle = KafkaSink(bootstrap, topic, settings=SinkSettings(fence_on_open=False))
    async with KafkaSink(bootstrap, topic) as owner:
        await owner.open(sink_id)
        await owner.begin(0)
        writer = owner.writer()
        await writer.write(values(range(3)))
        receipt = await writer.finish()
        with pytest.raises(InitFailed, match="has a transaction open"):
            await gentle.open(sink_id)
        await owner.commit(0, [receipt])
    assert await gentle.open(sink_id) == 0
    await gentle.close()


class OldSink(KafkaSink):
    """A sink on a broker that has version 1 of transactions."""

    def _transaction_options(self) -> TransactionOptions:
        return replace(super()._transaction_options(), max_version=1)


async def outlast(sink: KafkaSink, epoch: int, cluster: Cluster) -> Receipt:
    """Writes an epoch and waits until the broker has aborted it, for taking too long."""
    await sink.begin(epoch)
    writer = sink.writer()
    await writer.write(values(range(3)))
    receipt = await writer.finish()
    await settle(cluster, sink.topic)
    return receipt


async def fail_for_time(sink: KafkaSink, epoch: int, cluster: Cluster) -> None:
    receipt = await outlast(sink, epoch, cluster)
    with pytest.raises(CommitFailed, match=r"transaction_timeout is 1 s.*maxOffsetsPerTrigger"):
        await sink.commit(epoch, [receipt])
    await sink.abort(epoch)


async def test_an_epoch_that_took_too_long_is_aborted_and_run_again_once(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic, transaction_timeout=1) as sink:
        await sink.open(sink_id)
        run = sink.run
        for epoch in range(2):
            await fail_for_time(sink, epoch, cluster)
            await write_epoch(sink, epoch, values(range(2 * epoch, 2 * epoch + 2)))
        assert sink.run == run, "it was never opened anew: that would fence a successor"
        for _ in range(2):
            await fail_for_time(sink, 2, cluster)
        with pytest.raises(BeginFailed, match=r"took too long 2 times.*open the sink anew"):
            await sink.begin(2)
        await sink.close()
        await sink.open(sink_id)
        await write_epoch(sink, 2, values(range(4, 6)))
    assert await read_committed(cluster, topic) == [[b"%d" % i for i in range(6)]]


async def test_a_writer_that_took_too_long_says_so_and_the_epoch_is_run_again(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    settings = SinkSettings(max_buffered=1)
    async with KafkaSink(bootstrap, topic, transaction_timeout=1, settings=settings) as sink:
        await sink.open(sink_id)
        await sink.begin(0)
        writer = sink.writer()
        await writer.write(values([0]))
        await settle(cluster, topic)
        with pytest.raises(WriteFailed, match=r"after transaction_timeout \(1000 ms.*maxOffsetsPerTrigger"):
            await writer.write(values([1]))
        await writer.cancel()
        await sink.abort(0)
        await write_epoch(sink, 0, values(range(2)))
    assert await read_committed(cluster, topic) == [[b"0", b"1"]]


@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "not signed yet"])
async def test_an_owner_that_took_too_long_and_was_replaced_does_not_touch_its_successor(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, is_signed: bool
) -> None:
    await make_topic(cluster, topic)
    successor = SharedTransaction(cluster, transactional_id_of(sink_id))
    async with KafkaSink(bootstrap, topic, transaction_timeout=1) as sink:
        await sink.open(sink_id)
        receipt = await outlast(sink, 0, cluster)
        await successor.open()
        await successor.begin()
        group, where = GroupMetadata(sink_id), TopicPartition(topic, 0)
        if is_signed:
            owner = Owner("elsewhere", 1, "its run", "today")
            await MarkerStore(sink_id, topic).put(successor, NO_MARKER, owner)
            await successor.commit()
            await successor.begin()
        await successor.commit_offsets(group, {where: CommittedOffset(7)})
        if is_signed:
            with pytest.raises(FencedOut, match="its run"):
                await sink.commit(0, [receipt])
        else:
            with pytest.raises(CommitFailed, match="transaction_timeout"):
                await sink.commit(0, [receipt])
            with pytest.raises(AbortFailed, match="transaction_timeout"):
                await sink.abort(0)
        assert sink.state is State.FAILED
        await sink.close()
        await successor.commit()
        await successor.close()
    assert (await fetch_offsets(cluster, sink_id, [where]))[where].offset == 7
    assert await read_committed(cluster, topic) == [[]]


async def test_on_version_1_an_epoch_that_took_too_long_is_left_to_the_next_open(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    """Nothing tells there whether another owner has come."""
    await make_topic(cluster, topic)
    async with OldSink(bootstrap, topic, transaction_timeout=1) as sink:
        await sink.open(sink_id)
        receipt = await outlast(sink, 0, cluster)
        with pytest.raises(CommitFailed, match=r"transaction_timeout is 1 s.*maxOffsetsPerTrigger"):
            await sink.commit(0, [receipt])
        with pytest.raises(AbortFailed, match=r"maxOffsetsPerTrigger.*Open the sink anew"):
            await sink.abort(0)
        assert await sink.open(sink_id) is None
        await write_epoch(sink, 0, values(range(2)))
    assert await read_committed(cluster, topic) == [[b"0", b"1"]]


async def set_verification(cluster: Cluster, enabled: bool) -> None:
    """Whether Kafka checks transactional batches with their coordinator, as it did not before 3.6."""
    name = "transaction.partition.verification.enable"
    config = AlterableConfig(name=name, config_operation=SET_CONFIG, value=str(enabled).lower())
    resource = AlterConfigsResource(resource_type=BROKER_RESOURCE, resource_name="1", configs=[config])
    connection = await cluster.any_connection()
    response = await connection.request(
        IncrementalAlterConfigsRequest(resources=[resource]), IncrementalAlterConfigsResponse
    )
    check(response.responses[0].error_code, "verification was not set", response.responses[0].error_message)
    # The broker takes it from the metadata log, a moment later.
    while config_value(await Admin(cluster).broker_configs(1), name) != config.value:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_broker_that_does_not_verify_partitions_is_warned_of(
    kafka_broker: KafkaProcess, topic: str, sink_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(kafka_broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        async with OldSink(kafka_broker.bootstrap, topic) as sink:
            await sink.open(sink_id)
        assert "does not verify" not in caplog.text
        await set_verification(cluster, False)
        try:
            async with OldSink(kafka_broker.bootstrap, topic) as sink:
                await sink.open(sink_id)
        finally:
            await set_verification(cluster, True)
    assert f"a writer of sink '{sink_id}' that wakes up late may not be fenced" in caplog.text


async def test_a_closed_sink_may_be_opened_again(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic)
    sink = KafkaSink(bootstrap, topic)
    for epoch in range(2):
        await sink.open(sink_id)
        await write_epoch(sink, epoch, values([epoch]))
        await sink.close()
    with pytest.raises(BeginFailed, match="is closed"):
        await sink.begin(2)
    assert await read_committed(cluster, topic) == [[b"0", b"1"]]
