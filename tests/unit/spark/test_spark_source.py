"""The driver's part of the reader, called as Spark calls it, against a broker of the tests."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fake_broker import FakeBroker, Partition, ThreadedBroker, hang_up
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from semel.errors import ConfigError, SemelError
from semel.spark.source import RangePartition, SemelDataSource, SemelStreamReader
from semel.spark.source_fetch import DataLostError
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.records import Record, build_batch

ALL = ReadAllAvailable()


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with ThreadedBroker(FakeBroker({"t": 2, "u": 1})) as running:
        yield running


def fill(broker: FakeBroker, topic: str, partition: int, records: int) -> None:
    for _ in range(records):
        batch = build_batch([Record(None, b"x", 0)])
        broker.topics[topic][partition].store(batch, read_header(batch))


def stream(broker: FakeBroker, topics: str = "t", **options: str) -> SemelStreamReader:
    given = {"kafka.bootstrap.servers": broker.bootstrap, "subscribe": topics, **options}
    source = SemelDataSource(given)
    return source.streamReader(source.schema())


def ranges(reader: SemelStreamReader, start: Any, end: Any) -> list[tuple[str, int, int, int]]:
    wanted = [each.wanted for each in reader.partitions(start, end) if isinstance(each, RangePartition)]
    return [(each.where.topic, each.where.partition, each.start, each.end) for each in wanted]


def catch_up(reader: SemelStreamReader, limit: ReadLimit) -> list[Any]:
    """The ends of all batches, as Spark would run them, until nothing is left."""
    ends = [reader.initialOffset()]
    while (end := reader.latestOffset(ends[-1], limit)) != ends[-1]:
        ends.append(end)
    reader.stop()
    return ends


def test_a_batch_goes_from_the_beginning_to_the_end(broker: FakeBroker) -> None:
    fill(broker, "t", 1, 7)
    reader = stream(broker, "u,t")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    assert json.dumps(end) == '{"t": {"0": 0, "1": 7}, "u": {"0": 0}}'
    assert ranges(reader, start, end) == [("t", 1, 0, 7)]
    assert reader.reportLatestOffset() == end
    reader.stop()


def test_a_limit_is_kept_and_all_comes_in_the_end(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 50)
    fill(broker, "t", 1, 30)
    reader = stream(broker, maxOffsetsPerTrigger="20")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(20)
    ends = catch_up(reader, limit)
    assert ends[1] == {"t": {"0": 12, "1": 7}}
    assert ends[-1] == {"t": {"0": 50, "1": 30}}


def test_without_a_limit_the_engine_is_told_to_take_everything(broker: FakeBroker) -> None:
    assert stream(broker).getDefaultReadLimit() == ALL


def test_available_now_does_not_go_past_what_there_was(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 5)
    reader = stream(broker)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    fill(broker, "t", 0, 5)
    end = reader.latestOffset(start, ALL)
    assert end == {"t": {"0": 5, "1": 0}}
    assert reader.latestOffset(end, ALL) == end
    reader.stop()


def test_the_first_batch_from_the_latest_is_empty_also_when_it_is_planned_again(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 5)
    first = stream(broker, startingOffsets="latest")
    start = first.initialOffset()
    fill(broker, "t", 0, 3)
    assert first.initialOffset() == start
    logged = first.latestOffset(start, ALL)
    assert logged == start == {"t": {"0": 5, "1": 0}}
    assert first.latestOffset(start, ALL) == {"t": {"0": 8, "1": 0}}
    first.stop()

    again = stream(broker, startingOffsets="latest")
    assert again.initialOffset() == {"t": {"0": 8, "1": 0}}
    assert ranges(again, again.initialOffset(), logged) == []
    end = again.latestOffset(logged, ALL)
    assert ranges(again, logged, end) == [("t", 0, 5, 8)]
    again.stop()


FROM_LATEST = pytest.mark.parametrize(
    "starting", ["latest", '{"t": {"0": -1, "1": -2}}', '{"t": {"0": -1, "1": 0}}']
)


@FROM_LATEST
def test_the_second_batch_begins_where_the_empty_first_one_did_and_has_its_rows(
    broker: FakeBroker, starting: str
) -> None:
    fill(broker, "t", 0, 5)
    reader = stream(broker, startingOffsets=starting)
    initial = reader.initialOffset()
    assert reader.latestOffset(initial, ALL) == initial == {"t": {"0": 5, "1": 0}}
    assert ranges(reader, reader.initialOffset(), initial) == []
    fill(broker, "t", 0, 3)
    second = reader.latestOffset(initial, ALL)
    assert ranges(reader, initial, second) == [("t", 0, 5, 8)]
    fill(broker, "t", 1, 2)
    third = reader.latestOffset(second, ALL)
    assert ranges(reader, second, third) == [("t", 1, 0, 2)]
    reader.stop()


@FROM_LATEST
@pytest.mark.parametrize("more", [0, 2], ids=["nothing came in", "records came in"])
def test_after_an_empty_first_batch_is_run_again_the_second_has_its_rows(
    broker: FakeBroker, starting: str, more: int
) -> None:
    """The driver died between `offsets/0` and `commits/0`; its successor does not know what to begin with."""
    fill(broker, "t", 0, 5)
    logged = {"t": {"0": 5, "1": 0}}
    fill(broker, "t", 0, more)
    reader = stream(broker, startingOffsets=starting)
    for _ in range(2):
        assert ranges(reader, reader.initialOffset(), logged) == []
    fill(broker, "t", 0, 3)
    second = reader.latestOffset(logged, ALL)
    assert ranges(reader, logged, second) == [("t", 0, 5, 8 + more)]
    reader.stop()


@FROM_LATEST
def test_a_second_batch_that_is_run_again_has_its_rows(broker: FakeBroker, starting: str) -> None:
    """The driver died between `offsets/1` and `commits/1`: all offsets come from the checkpoint."""
    fill(broker, "t", 0, 8)
    reader = stream(broker, startingOffsets=starting)
    second, third = {"t": {"0": 8, "1": 0}}, {"t": {"0": 9, "1": 0}}
    assert ranges(reader, {"t": {"0": 5, "1": 0}}, second) == [("t", 0, 5, 8)]
    fill(broker, "t", 0, 1)
    assert reader.latestOffset(second, ALL) == third
    assert ranges(reader, second, third) == [("t", 0, 8, 9)]
    reader.stop()


def test_a_first_batch_that_is_run_again_is_empty_though_it_would_begin_earlier_now(
    broker: FakeBroker,
) -> None:
    """Or sinks that have committed it, and those that have not, would not have the same rows."""
    fill(broker, "t", 0, 5)
    logged = {"t": {"0": 5, "1": 0}}
    told_otherwise = stream(broker, startingOffsets='{"t": {"0": 2, "1": -1}}')
    assert ranges(told_otherwise, told_otherwise.initialOffset(), logged) == []
    assert told_otherwise.latestOffset(logged, ALL) == logged
    told_otherwise.stop()

    broker.topics["t"][0] = Partition()
    fill(broker, "t", 0, 3)
    made_anew = stream(broker, startingOffsets="latest")
    assert ranges(made_anew, made_anew.initialOffset(), logged) == []
    with pytest.raises(DataLostError, match="t-0 was read up to offset 5, and ends at 3 now"):
        made_anew.latestOffset(logged, ALL)
    made_anew.stop()


@FROM_LATEST
def test_available_now_from_the_latest_takes_no_record_that_comes_in_meanwhile_for_lost(
    broker: FakeBroker, starting: str
) -> None:
    """Spark has the end looked up before the beginning."""
    reader = stream(broker, startingOffsets=starting)
    reader.prepareForTriggerAvailableNow()
    fill(broker, "t", 0, 5)
    initial = reader.initialOffset()
    fill(broker, "t", 0, 3)
    assert reader.latestOffset(initial, ALL) == initial
    assert reader.latestOffset(initial, ALL) == initial == {"t": {"0": 5, "1": 0}}
    reader.stop()


def test_available_now_reads_on_after_an_empty_first_batch_that_is_run_again(broker: FakeBroker) -> None:
    logged = {"t": {"0": 0, "1": 0}}
    fill(broker, "t", 0, 3)
    reader = stream(broker, startingOffsets="latest")
    reader.prepareForTriggerAvailableNow()
    assert ranges(reader, reader.initialOffset(), logged) == []
    end = reader.latestOffset(logged, ALL)
    assert ranges(reader, logged, end) == [("t", 0, 0, 3)]
    assert reader.latestOffset(end, ALL) == end
    reader.stop()


FROM_EARLIEST = pytest.mark.parametrize("starting", ["earliest", '{"t": {"0": -2, "1": 0}}'])


def cut(broker: FakeBroker, offset: int) -> None:
    """Retention deletes what is older."""
    broker.topics["t"][0].log_start_offset = offset


@FROM_EARLIEST
def test_the_first_batch_from_a_log_that_was_cut_is_empty_also_when_it_is_run_again(
    broker: FakeBroker, starting: str
) -> None:
    """Or it would begin elsewhere then, if more was cut meanwhile: its start is not in the checkpoint."""
    fill(broker, "t", 0, 8)
    cut(broker, 5)
    first = stream(broker, startingOffsets=starting)
    initial = first.initialOffset()
    logged = first.latestOffset(initial, ALL)
    assert logged == initial == {"t": {"0": 5, "1": 0}}
    assert ranges(first, initial, logged) == []
    second = first.latestOffset(logged, ALL)
    assert ranges(first, logged, second) == [("t", 0, 5, 8)]
    first.stop()

    again = stream(broker, startingOffsets=starting)
    for _ in range(2):
        assert ranges(again, again.initialOffset(), logged) == []
    assert ranges(again, logged, again.latestOffset(logged, ALL)) == [("t", 0, 5, 8)]
    again.stop()


def test_an_empty_first_batch_that_is_run_again_minds_no_partition_that_was_added(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 8)
    cut(broker, 5)
    logged = {"t": {"0": 5, "1": 0}}
    broker.topics["t"].append(Partition())
    fill(broker, "t", 2, 4)
    reader = stream(broker)
    assert ranges(reader, reader.initialOffset(), logged) == []
    end = reader.latestOffset(logged, ALL)
    assert ranges(reader, logged, end) == [("t", 0, 5, 8), ("t", 2, 0, 4)]
    reader.stop()


@FROM_EARLIEST
def test_a_first_batch_that_is_run_again_after_its_log_was_cut_is_an_error_or_reads_the_rest(
    broker: FakeBroker, starting: str
) -> None:
    fill(broker, "t", 0, 8)
    first = stream(broker, startingOffsets=starting)
    initial = first.initialOffset()
    logged = first.latestOffset(initial, ALL)
    assert ranges(first, initial, logged) == [("t", 0, 0, 8)]
    first.stop()
    again = stream(broker, startingOffsets=starting)
    assert ranges(again, again.initialOffset(), logged) == [("t", 0, 0, 8)]
    again.stop()

    cut(broker, 5)
    strict = stream(broker, startingOffsets=starting)
    with pytest.raises(DataLostError, match="t-0 begins at offset 5 now, and the first batch of this query"):
        ranges(strict, strict.initialOffset(), logged)
    strict.stop()
    lenient = stream(broker, startingOffsets=starting, failOnDataLoss="false")
    assert ranges(lenient, lenient.initialOffset(), logged) == [("t", 0, 5, 8)]
    lenient.stop()


def test_an_empty_first_batch_whose_log_was_cut_further_is_an_error_or_the_next_goes_on(
    broker: FakeBroker,
) -> None:
    fill(broker, "t", 0, 8)
    cut(broker, 6)
    logged = {"t": {"0": 5, "1": 0}}
    strict = stream(broker)
    with pytest.raises(DataLostError, match="t-0 begins at offset 6 now"):
        ranges(strict, strict.initialOffset(), logged)
    strict.stop()
    lenient = stream(broker, failOnDataLoss="false")
    assert ranges(lenient, lenient.initialOffset(), logged) == []
    assert ranges(lenient, logged, lenient.latestOffset(logged, ALL)) == [("t", 0, 5, 8)]
    lenient.stop()


def test_offsets_that_a_user_gave_do_not_move_and_need_no_empty_batch(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 8)
    cut(broker, 3)
    given = '{"t": {"0": 4, "1": -2}}'
    for _ in range(2):
        reader = stream(broker, startingOffsets=given)
        initial = reader.initialOffset()
        logged = reader.latestOffset(initial, ALL)
        assert ranges(reader, initial, logged) == [("t", 0, 4, 8)]
        reader.stop()
    again = stream(broker, startingOffsets=given)
    assert ranges(again, again.initialOffset(), logged) == [("t", 0, 4, 8)]
    again.stop()


def test_a_new_partition_is_read_from_its_beginning_and_must_have_one(broker: FakeBroker) -> None:
    reader = stream(broker)
    start = reader.initialOffset()
    broker.topics["t"].append(Partition())
    fill(broker, "t", 2, 4)
    reader.stop()
    later = stream(broker)
    end = later.latestOffset(start, ALL)
    assert ranges(later, start, end) == [("t", 2, 0, 4)]
    broker.topics["t"][2].log_start_offset = 3
    with pytest.raises(DataLostError, match="t-2 is new to this query, and begins at offset 3"):
        later.partitions(start, end)
    later.stop()
    lenient = stream(broker, failOnDataLoss="false")
    assert ranges(lenient, start, end) == [("t", 2, 3, 4)]
    lenient.stop()


def test_a_topic_that_was_made_anew_is_an_error_or_begins_again(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 3)
    before = {"t": {"0": 9, "1": 0}}
    strict = stream(broker)
    with pytest.raises(DataLostError, match="t-0 was read up to offset 9, and ends at 3 now"):
        strict.latestOffset(before, ALL)
    strict.stop()
    lenient = stream(broker, failOnDataLoss="false")
    end = lenient.latestOffset(before, ALL)
    assert end == {"t": {"0": 3, "1": 0}}
    assert ranges(lenient, before, end) == []
    lenient.stop()


def test_offsets_must_be_given_for_every_partition(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 3)
    exact = stream(broker, startingOffsets='{"t": {"0": 2, "1": -2}}')
    assert exact.initialOffset() == {"t": {"0": 2, "1": 0}}
    exact.stop()
    for given, says in (('{"t": {"0": 2}}', r"it lacks t \['1'\]"), ('{"u": {"0": 1}}', "there is no u")):
        reader = stream(broker, startingOffsets=given)
        with pytest.raises(ConfigError, match=says):
            reader.initialOffset()
        reader.stop()


def test_offsets_past_the_end_are_refused_and_not_taken_for_a_loss(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 3)
    past = '{"t": {"0": 4, "1": 0}}'
    says = "Offsets has offset 4 for t-0, and that ends at 3: give an offset up to its end, or -1"
    for lenient in ("true", "false"):
        reader = stream(broker, startingOffsets=past, failOnDataLoss=lenient)
        with pytest.raises(ConfigError, match=f"starting{says}"):
            reader.initialOffset()
        reader.stop()
    for name in ("startingOffsets", "endingOffsets"):
        source = SemelDataSource({"kafka.bootstrap.servers": broker.bootstrap, "subscribe": "t", name: past})
        with pytest.raises(ConfigError, match=name.removesuffix("Offsets") + says):
            source.reader(source.schema()).partitions()
    at_the_end = stream(broker, startingOffsets=past.replace("4", "3"))
    assert at_the_end.initialOffset() == {"t": {"0": 3, "1": 0}}
    at_the_end.stop()


def test_a_broker_that_hangs_up_is_asked_again(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 3)
    reader = stream(broker)
    broker.misbehave(ApiKey.LIST_OFFSETS, hang_up, hang_up)
    assert reader.initialOffset() == {"t": {"0": 0, "1": 0}}
    reader.stop()


def test_a_topic_that_does_not_exist_is_named(broker: FakeBroker) -> None:
    reader = stream(broker, "nothing")
    with pytest.raises(SemelError, match="topic 'nothing' cannot be used"):
        reader.initialOffset()
    reader.stop()


def test_an_idle_stream_does_not_ask_for_metadata_each_time(broker: FakeBroker) -> None:
    reader = stream(broker)
    start = reader.initialOffset()
    before = len(broker.seen(ApiKey.METADATA))
    for _ in range(20):
        reader.latestOffset(start, ALL)
    assert len(broker.seen(ApiKey.METADATA)) - before <= 2
    reader.stop()


def test_options_of_the_other_kind_of_query_are_refused(broker: FakeBroker) -> None:
    with pytest.raises(ConfigError, match="a stream has no end"):
        stream(broker, endingOffsets='{"t": {"0": 1, "1": 1}}')
    source = SemelDataSource({"kafka.bootstrap.servers": "b", "subscribe": "t", "maxOffsetsPerTrigger": "5"})
    with pytest.raises(ConfigError, match="is for streams"):
        source.reader(source.schema())


def test_a_reader_travels_to_the_executors(broker: FakeBroker) -> None:
    fill(broker, "t", 0, 3)
    reader = pickle.loads(pickle.dumps(stream(broker)))
    wanted = stream(broker).partitions({"t": {"0": 1, "1": 0}}, {"t": {"0": 3, "1": 0}})
    rows = [row for part in wanted for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == [1, 2]


def test_executors_load_the_reader_and_the_client_and_nothing_of_the_broker() -> None:
    program = "import sys, semel.spark.source; print(*(name for name in sys.modules if 'semel.' in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    parts = {name.split(".")[1] for name in loaded}
    assert parts == {"client", "compilation", "errors", "spark", "version", "wire"}
    of_spark = [name for name in loaded if name.startswith("semel.spark.")]
    assert all(name.startswith("semel.spark.source") for name in of_spark), of_spark
