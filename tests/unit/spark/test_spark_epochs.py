"""What the driver and the tasks of `exactly_once` decide, without a Spark."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from semel.client.metadata import Address
from semel.client.shared_transaction import TransactionHandle
from semel.errors import ConfigError
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka import KafkaPlan, RecordLayout
from semel.sinks.kafka.encoded import encode_rows
from semel.sinks.kafka.sink import KafkaSink
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.receipts import Place
from semel.sinks.service import ServiceAddress
from semel.sinks.tasks import EncodeTask, SendTask, TargetTask, WriteTask
from semel.spark.checkpoint import parse_offsets, source_bootstrap
from semel.spark.epochs import LOST_WORK, _run_tasks
from semel.spark.pipeline import exactly_once, sink_id
from semel.wire.batch import check_batch, check_crc, place_sequence
from semel.wire.partitioner import partition_for_key
from semel.wire.records import read_records

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":%d,"conf":{}}'


def offsets_text(time_ms: int, *sources: str) -> str:
    return "\n".join(["v1", METADATA % time_ms, *sources])


def test_the_digest_is_of_the_sources_offsets_and_not_of_the_time_of_planning() -> None:
    first = parse_offsets(offsets_text(1, '{"orders":{"0":12}}'))
    again = parse_offsets(offsets_text(2, '{"orders":{"0":12}}'))
    other = parse_offsets(offsets_text(1, '{"orders":{"0":13}}'))
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_the_digest_tells_sources_apart() -> None:
    assert (
        parse_offsets(offsets_text(1, "1", "23")).digest != parse_offsets(offsets_text(1, "12", "3")).digest
    )


def test_offsets_of_several_topics_are_taken_together_and_those_of_other_sources_left_out() -> None:
    found = parse_offsets(
        offsets_text(1, '{"a":{"0":1,"1":2}}', "7", "-", '{"b":{"0":3}}', '{"logOffset":4}')
    )
    assert found.by_topic() == {"a": {0: 1, 1: 2}, "b": {0: 3}}


@pytest.mark.parametrize("text", ["", "nonsense", "v1"])
def test_a_file_that_is_no_offsets_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no format"):
        parse_offsets(text)


def test_the_sources_cluster_is_known_if_there_is_one() -> None:
    one, two = {"kafka.bootstrap.servers": "a:1"}, {"kafka.bootstrap.servers": "b:2"}
    assert source_bootstrap([one, one]) == "a:1"
    assert source_bootstrap([one, two]) is None
    assert source_bootstrap([{"path": "x"}]) is None
    assert source_bootstrap([]) is None


def test_the_first_sink_has_the_pipelines_name_so_that_others_may_be_added() -> None:
    assert [sink_id("totals", place) for place in range(3)] == ["totals", "totals/1", "totals/2"]


def test_a_frame_of_spark_connect_is_refused_with_the_reason() -> None:
    remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe", "isStreaming": True})()
    with pytest.raises(ConfigError, match="Spark Connect, where foreachBatch runs in another process"):
        exactly_once(remote, KafkaSink("localhost:1", "out"), name="p", checkpoint="/nowhere")


def targets(
    layout: RecordLayout, columns: dict[str, list[object]], partitions: int, homeless: int = 1
) -> list[int]:
    task = TargetTask(layout, "own", partitions)
    found: list[int] = task.targets(pa.RecordBatch.from_pydict(columns), homeless).tolist()
    return found


def test_a_rows_target_is_its_key_s_partition_or_that_of_its_task() -> None:
    found = targets(RecordLayout(), {"key": [b"a", None, b"b"], "value": [b"", b"", b""]}, 7, homeless=5)
    assert found == [partition_for_key(b"a", 7), 5, partition_for_key(b"b", 7)]


def test_a_partition_column_goes_before_the_key() -> None:
    columns: dict[str, list[object]] = {"key": [b"a", b"a", None], "value": [b""] * 3, "p": [3, None, None]}
    assert targets(RecordLayout(partition="p"), columns, 7) == [3, partition_for_key(b"a", 7), 1]


def test_rows_of_one_topic_have_one_target_and_rows_without_one_that_of_the_sinks_own() -> None:
    columns: dict[str, list[object]] = {
        "key": [b"a", b"b", b"c", b"d"],
        "value": [b""] * 4,
        "t": ["x", "x", None, "own"],
    }
    found = targets(RecordLayout(topic="t"), columns, 7)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def kafka_plan() -> KafkaPlan:
    sink = KafkaSink("localhost:1", "out")
    handle = TransactionHandle("localhost:1", "semel-sink.x", 1, 0, 2)
    return KafkaPlan(Place("run", 0, 0), handle, sink._writer_settings, ServiceAddress(Address("h", 1), "t"))


def test_executors_import_sinks_client_and_wire_alone() -> None:
    tasks = [
        WriteTask(kafka_plan(), 2, is_once=True, grace_s=0.0).run,
        SendTask(kafka_plan(), 2, is_once=True, grace_s=0.0).run,
        EncodeTask(shared_plan()).run,
        TargetTask(RecordLayout(), "out", 4).run,
    ]
    program = (
        "import pickle, sys; pickle.load(sys.stdin.buffer); "
        "print(*sorted(name for name in sys.modules if name.startswith('semel')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], input=cloudpickle.dumps(tasks), capture_output=True, check=True
    ).stdout.decode()
    allowed = (
        "semel.sinks",
        "semel.client",
        "semel.wire",
        "semel.errors",
        "semel.version",
        "semel.compilation",
    )
    strangers = [name for name in loaded.split() if name != "semel" and not name.startswith(allowed)]
    assert "semel.sinks.tasks" in loaded
    assert not strangers


def shared_plan(**columns: str | None) -> KafkaPlan:
    sink = KafkaSink("localhost:1", "out", **columns)  # type: ignore[arg-type]
    settings = replace(sink._writer_settings, topics={"out": TopicShape(3, 2_000)})
    handle = TransactionHandle("localhost:1", "semel-sink.x", 7, 5, 2)
    return KafkaPlan(Place("run", 0, 0), handle, settings, ServiceAddress(Address("h", 1), "t"))


def test_batches_that_are_encoded_before_a_shuffle_are_what_a_writer_would_have_sent() -> None:
    keys = [b"k%d" % i for i in range(200)]
    rows = pa.RecordBatch.from_pydict({"key": keys, "value": [b"v" * (i % 50) for i in range(200)]})
    plan = shared_plan()
    partitions = EncodeTask(plan).targets(rows, 0)
    sequences = dict.fromkeys(range(3), 0)
    found: list[tuple[int, bytes | None, bytes | None]] = []
    for partition, batch in encode_rows(plan, rows, partitions, 0):
        place_sequence(batch, sequences[partition])
        header = check_batch(batch)
        check_crc(batch, header)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
            7,
            5,
            sequences[partition],
        )
        assert header.is_transactional
        assert len(batch) <= 2_000
        sequences[partition] += header.record_count
        found += [(partition, record.key, record.value) for record in read_records(batch)]
    assert sorted(found) == sorted(
        (partition_for_key(key, 3), key, b"v" * (i % 50)) for i, key in enumerate(keys)
    )


def test_a_row_that_no_batch_can_hold_is_named_before_the_shuffle() -> None:
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"", b"v" * 3_000]})
    with pytest.raises(WriteFailed, match=r"row 11.*max\.message\.bytes") as refused:
        list(encode_rows(shared_plan(), rows, np.array([0, 1]), 10))
    assert refused.value.is_permanent


@pytest.mark.parametrize("wrong", [-5, 3])
def test_a_partition_that_does_not_exist_is_refused_before_the_shuffle_as_by_a_writer(wrong: int) -> None:
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"", b""], "p": [2, wrong]})
    plan = shared_plan(partition_column="p")
    with pytest.raises(WriteFailed, match=f"row 1 .*partition {wrong}, and there are 3"):
        list(encode_rows(plan, rows, EncodeTask(plan).targets(rows, 0), 0))


def test_rows_that_make_no_batch_together_are_an_error_of_rows_and_not_of_the_task() -> None:
    times = [-(2**62) - 1, 2**62]
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"a"], "value": [b"", b""], "t": times})
    with pytest.raises(WriteFailed, match="make no record batch") as refused:
        list(encode_rows(shared_plan(timestamp_column="t"), rows, np.array([0, 0]), 0))
    assert refused.value.is_permanent


class GivenUp:
    """A frame whose job fails."""

    def __init__(self, says: str) -> None:
        self._says = says

    def collect(self) -> list[object]:
        raise RuntimeError(f"Job aborted due to stage failure\n{self._says}\n\tat DAGScheduler.scala:1")


@pytest.mark.parametrize("says", LOST_WORK)
def test_a_job_that_spark_gave_up_for_what_it_lost_spoils_the_epoch(says: str) -> None:
    with pytest.raises(WriteFailed, match=f"gave the job up: stage 6: {says}$") as spoiled:
        _run_tasks(GivenUp(f"stage 6: {says}"))  # type: ignore[arg-type]
    assert not spoiled.value.is_permanent


def test_a_job_that_the_users_code_has_failed_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="119 is not allowed"):
        _run_tasks(GivenUp("ValueError: 119 is not allowed"))  # type: ignore[arg-type]
