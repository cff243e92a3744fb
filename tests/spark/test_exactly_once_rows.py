"""Rows on their way to the tasks: large ones among small ones, and types whose size nobody knows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from broker_process import BrokerProcess
from pipeline_cases import Pipeline
from spark_cases import Row, committed_records, produce

from row_checks import check_rows
from semel.spark.transfer import MAX_BYTES, MAX_RECORDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PER_BATCH = 50
# Of a batch of a hundred records: so rows of up to a kilobyte need not be measured.
BATCH_BYTES = 100_000
LARGE = b"x" * 5_000


@pytest.fixture
def pipeline(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> Iterator[Pipeline]:
    session = spark.newSession()
    session.conf.set(MAX_BYTES, f"{BATCH_BYTES}b")
    session.conf.set(MAX_RECORDS, "100")
    yield Pipeline(session, shared_broker.bootstrap, topic, tmp_path)
    for query in spark.streams.active:
        query.stop()


def feed(pipeline: Pipeline, values: list[bytes]) -> None:
    rows = [Row(value, b"k%d" % number, partition=0) for number, value in enumerate(values)]
    produce(pipeline.bootstrap, pipeline.source, rows)


def test_the_first_large_row_costs_one_attempt_and_later_ones_none(pipeline: Pipeline) -> None:
    small = [b"v%d" % number for number in range(PER_BATCH)]
    batches = [small, [*small[1:], LARGE], [LARGE, *small[1:]], [LARGE] * PER_BATCH]
    values = [value for batch in batches for value in batch]
    feed(pipeline, values)
    query = pipeline.run(df=pipeline.read(PER_BATCH))
    check_rows(pipeline.content(), values)
    assert query.attempts == len(batches) + 1


def test_rows_with_headers_are_measured_by_spark_from_the_start(pipeline: Pipeline) -> None:
    feed(pipeline, [LARGE] * PER_BATCH)
    df = pipeline.read(PER_BATCH).selectExpr("key", "value", "map('origin', key) AS headers")
    query = pipeline.run(pipeline.sink(headers="headers"), df)
    found = committed_records(pipeline.bootstrap, pipeline.target)
    wanted = [(LARGE, (("origin", b"k%d" % number),)) for number in range(PER_BATCH)]
    check_rows(((record.value, tuple(record.headers)) for _, record in found), wanted)
    assert query.attempts == 1


def test_batches_of_the_querys_own_python_keep_their_bound(pipeline: Pipeline, tmp_path: Path) -> None:
    """Rows that are large on their way in and small on their way out: the sink's guard would see nothing."""
    seen = tmp_path / "seen"
    seen.mkdir()

    def shorten(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            (seen / f"{batch.nbytes}-{uuid.uuid4().hex}").touch()
            short = pa.array([value.as_py()[:1] for value in batch.column("value")], pa.binary())
            yield pa.RecordBatch.from_arrays([batch.column("key"), short], ["key", "value"])

    feed(pipeline, [LARGE] * PER_BATCH)
    df = pipeline.read(PER_BATCH).select("key", "value").mapInArrow(shorten, "key binary, value binary")
    query = pipeline.run(df=df)
    check_rows(pipeline.content(), [b"x"] * PER_BATCH)
    assert query.attempts == 1
    sizes = [int(path.name.partition("-")[0]) for path in seen.iterdir()]
    assert sum(sizes) > 2 * BATCH_BYTES, "they would not have fitted into one"
    assert max(sizes) < BATCH_BYTES + 2 * len(LARGE)
