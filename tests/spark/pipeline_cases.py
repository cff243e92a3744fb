"""A pipeline from a topic to a topic, and what tests of `exactly_once` do with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_cases import Row, committed_records, create_topic, produce

import semel.spark
from row_checks import check_rows
from semel.sinks.kafka import KafkaSink
from semel.sinks.sink import TransactionalSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS: Final = 120


class Pipeline:
    """An input topic, an output topic, and what a test does with them."""

    def __init__(self, spark: SparkSession, bootstrap: str, name: str, directory: Path) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.name = name
        self.source = f"{name}-in"
        self.target = f"{name}-out"
        self.checkpoint = directory / "checkpoint"
        create_topic(bootstrap, self.source, 3)
        create_topic(bootstrap, self.target, 4)

    def feed(self, start: int, stop: int) -> None:
        produce(self.bootstrap, self.source, [Row(b"v%d" % i, b"k%d" % i) for i in range(start, stop)])

    def read(self, per_batch: int = 50) -> DataFrame:
        return semel.spark.read(self.spark, self.bootstrap, self.source, maxOffsetsPerTrigger=per_batch)

    def sink(self, **options: Any) -> KafkaSink:
        return KafkaSink(self.bootstrap, self.target, **options)

    def start(
        self,
        sink: TransactionalSink | list[TransactionalSink] | None = None,
        df: DataFrame | None = None,
        trigger: str | None = "availableNow",
    ) -> semel.spark.PipelineQuery:
        pipeline = semel.spark.exactly_once(
            self.read() if df is None else df, sink or self.sink(), name=self.name, checkpoint=self.checkpoint
        )
        return pipeline.start(trigger)

    def run(
        self, sink: TransactionalSink | list[TransactionalSink] | None = None, df: DataFrame | None = None
    ) -> semel.spark.PipelineQuery:
        """To the end of the input."""
        query = self.start(sink, df)
        query.awaitTermination()
        return query

    def content(self, topic: str | None = None) -> Counter[bytes | None]:
        return Counter(record.value for _, record in committed_records(self.bootstrap, topic or self.target))

    def check(self, stop: int, topic: str | None = None) -> None:
        """All values up to here, each once."""
        wanted = Counter(b"v%d" % i for i in range(stop))
        check_rows(self.content(topic), wanted, topic or self.target)

    def last_commit(self) -> int:
        """The last batch in Spark's commit log."""
        commits = (self.checkpoint / "commits").iterdir()
        return max(int(path.name) for path in commits if path.name.isdecimal())

    def forget_last_commit(self) -> int:
        """What a crash between the sink's commit and Spark's commit log leaves behind."""
        batch = self.last_commit()
        for path in (self.checkpoint / "commits").glob(f"*{batch}*"):
            path.unlink()
        return batch
