"""Topics as a data source of Spark, in Python: no jars. Its name is "semel".

Rules:

- The driver plans: it asks the brokers where partitions end (under read_committed the last stable offset) and
  cuts a batch into ranges. Executors read ranges. Nothing is kept between batches but what Spark's checkpoint
  holds: `commit` does nothing.
- Spark writes the end of a batch into its checkpoint before it runs, but never the start of the first one: a
  driver that dies in its first batch asks for the initial offsets again. `latest` would have moved by then,
  and records be lost; `earliest` moves, too, where old records are deleted, and sinks that have committed the
  batch would have had other rows than those that have not. So the first batch of a query is empty where it
  starts at the latest offsets, or at the earliest of a log that begins above 0, and puts them into the
  checkpoint.
- A first batch from the latest that is run again, from other offsets, is empty still. From the earliest, one
  that is not empty began at 0. If a log begins above 0 when it is run again, records are gone: an error, or a
  warning. Only where they are gone right up to the batch's end, all of them, does it look like an empty one.
- From 0 no batch is made empty: most logs begin there, and the first batch of a query is what its user waits
  for.
- The first batch is known by where it begins and where it ends. That it begins at the initial offsets is not
  enough: the second one does, too, since the first one went nowhere.
- Partitions that come up later are read from their beginning.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from semel.client.admin import EARLIEST, LATEST
from semel.client.cluster import Cluster
from semel.client.settled_heap import settle
from semel.errors import ConfigError
from semel.spark.source_arrow import to_arrow
from semel.spark.source_fetch import RangeFetch
from semel.spark.source_offsets import OffsetRange, Offsets, OffsetsJson, batch_end, from_json, to_json
from semel.spark.source_options import ENDING_OFFSETS, FORMAT, MAX_OFFSETS, SourceOptions
from semel.spark.source_planner import Planner

COLUMNS: Final = (
    StructField("key", BinaryType()),
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("timestampType", IntegerType()),
)
HEADER: Final = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
HEADERS_COLUMN: Final = StructField("headers", ArrayType(HEADER))


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class SemelDataSource(DataSource):
    """The format "semel": `spark.readStream.format("semel")`, and `spark.read` for what is there now."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        include_headers = SourceOptions.of(self.options).include_headers
        return StructType([*COLUMNS, HEADERS_COLUMN] if include_headers else [*COLUMNS])

    def reader(self, schema: StructType) -> "SemelReader":
        options = SourceOptions.of(self.options)
        if options.max_offsets is not None:
            raise ConfigError(f"{MAX_OFFSETS} is for streams; a batch ends where {ENDING_OFFSETS} says")
        return SemelReader(options)

    def streamReader(self, schema: StructType) -> "SemelStreamReader":  # noqa: N802 - PySpark's name
        options = SourceOptions.of(self.options)
        if options.ending != LATEST:
            raise ConfigError(f"{ENDING_OFFSETS} is for batches; a stream has no end")
        return SemelStreamReader(options)


class SemelReader(DataSourceReader):
    """Reads what is there when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        planner = Planner(self._options)
        try:
            ranges = planner.plan(planner.starting_offsets(), planner.ending_offsets())
        finally:
            planner.close()
        return [RangePartition(each) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Where there is nothing to read, Spark still runs one task, without one of our partitions.
        return _read(self._options, partition) if isinstance(partition, RangePartition) else iter(())


class SemelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads batch by batch. It travels to the executors before it has connected to anything."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: Planner | None = None
        self._initial: Offsets | None = None
        # Where the first batch that this reader planned or was asked to run again ends.
        self._first_end: Offsets | None = None
        self._latest: Offsets | None = None
        self._target: Offsets | None = None

    # Spark's names

    def initialOffset(self) -> OffsetsJson:  # noqa: N802
        # Spark asks more than once for the same first batch.
        if self._initial is None:
            self._initial = self._connected().starting_offsets()
            if self._target is not None:
                # It was looked up before, and what has come in since would seem to be lost.
                self.prepareForTriggerAvailableNow()
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_offsets is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.max_offsets)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._connected().latest_offsets(fresh=True)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> OffsetsJson:  # noqa: N802
        begin = from_json(start)
        if self._first_end is None:
            self._first_end = begin
            if self._is_first(begin, begin) and (self._starts_at_latest or self._moving_starts(begin)):
                return to_json(begin)
        planner = self._connected()
        self._latest = self._target or planner.latest_offsets()
        planner.check_nothing_lost(begin, self._latest)
        return to_json(_admit(begin, self._latest, limit))

    def reportLatestOffset(self) -> OffsetsJson | None:  # noqa: N802
        return None if self._latest is None else to_json(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, until = from_json(start), from_json(end)
        if self._first_end is None:
            # Planned by a driver that died: Spark runs such a batch before it asks for another one.
            self._first_end = until
        if all(begin.get(where) == offset for where, offset in until.items()):
            return []
        if self._is_first(begin, until):
            if self._starts_at_latest:
                return []
            self._connected().check_first_is_whole(self._moving_starts(begin))
        return [RangePartition(each) for each in self._connected().plan(begin, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The checkpoint is the truth; nothing is told to the brokers."""

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    # The first batch

    @property
    def _starts_at_latest(self) -> bool:
        starting = self._options.starting
        return starting == LATEST if isinstance(starting, int) else LATEST in starting.values()

    def _moving_starts(self, begin: Offsets) -> Offsets:
        """Where logs begin above 0, if that is where the query does: another time they begin elsewhere."""
        starting = self._options.starting
        places = dict.fromkeys(begin, starting) if isinstance(starting, int) else starting
        return {
            where: offset for where, offset in begin.items() if offset > 0 and places.get(where) == EARLIEST
        }

    def _is_first(self, begin: Offsets, end: Offsets) -> bool:
        """Whether this is a query's first batch: a new one, or one that is run again."""
        return begin == self._initial and end == self._first_end

    def _connected(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner


def _admit(begin: Offsets, latest: Offsets, wanted: ReadLimit) -> Offsets:
    return batch_end(begin, latest, wanted.max_rows) if isinstance(wanted, ReadMaxRows) else latest


def _read(options: SourceOptions, partition: RangePartition) -> Iterator[pa.RecordBatch]:
    """The rows of one range, in the process of an executor's worker."""
    settle()
    with asyncio.Runner() as runner:
        cluster = Cluster(options.bootstrap, options.connection)
        fetch = runner.run(_open(cluster, partition.wanted, options))
        try:
            while not fetch.is_done:
                batches = runner.run(fetch.next_batches())
                yield from to_arrow(batches, fetch.wanted, include_headers=options.include_headers)
        finally:
            runner.run(fetch.close())
            runner.run(cluster.close())


async def _open(cluster: Cluster, wanted: OffsetRange, options: SourceOptions) -> RangeFetch:
    return RangeFetch(
        cluster,
        wanted,
        isolation_level=options.isolation_level,
        fails_on_data_loss=options.fail_on_data_loss,
    )
