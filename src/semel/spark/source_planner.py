"""Planning, on the driver: which partitions there are, where they begin and end, and what a batch reads.

One connection is kept for the life of a query. Spark asks for the latest offsets again and again, every few
milliseconds while nothing comes in; who has which partitions is looked up at most once a second for that.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from semel.client.admin import EARLIEST, LATEST, Admin
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.spark.source_fetch import RETRY_TIMEOUT_MS, report_loss
from semel.spark.source_offsets import OffsetRange, Offsets, split, to_json
from semel.spark.source_options import ENDING_OFFSETS, STARTING_OFFSETS, SourceOptions

METADATA_MAX_AGE_S: Final = 1.0

T = TypeVar("T")


class Planner:
    """The driver's view of the topics of one query. Close it."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._runner = asyncio.Runner()
        self._cluster = Cluster(options.bootstrap, options.connection)
        self._admin = Admin(self._cluster)
        self._partitions: list[TopicPartition] = []
        self._partitions_at = 0.0

    def close(self) -> None:
        self._runner.run(self._cluster.close())
        self._runner.close()

    # Offsets

    def starting_offsets(self) -> Offsets:
        starts = self._run(partial(self._resolve, STARTING_OFFSETS, self._options.starting))
        if not isinstance(self._options.starting, int):
            self._refuse_past_the_end(STARTING_OFFSETS, starts)
        return starts

    def latest_offsets(self, *, fresh: bool = False) -> Offsets:
        """Where the partitions end for this reader: the last stable offsets, or the high watermarks."""
        if fresh:
            self._partitions_at = 0.0
        return self._run(partial(self._resolve, "", LATEST))

    def ending_offsets(self) -> Offsets:
        ends = self._run(partial(self._resolve, ENDING_OFFSETS, self._options.ending))
        self._refuse_past_the_end(ENDING_OFFSETS, ends)
        return ends

    def _refuse_past_the_end(self, name: str, given: Offsets) -> None:
        latest = self.latest_offsets()
        for where, offset in given.items():
            if offset > latest.get(where, offset):
                raise ConfigError(
                    f"{name} has offset {offset} for {where}, and that ends at {latest[where]}: give an "
                    "offset up to its end, or -1, which is the latest"
                )

    async def _resolve(self, name: str, place: Offsets | int) -> Offsets:
        partitions = await self._find_partitions()
        if isinstance(place, int):
            return await self._find(dict.fromkeys(partitions, place))
        _check_all_named(name, place, partitions)
        symbols = {where: offset for where, offset in place.items() if offset < 0}
        return {**place, **(await self._find(symbols) if symbols else {})}

    async def _find(self, timestamps: Mapping[TopicPartition, int]) -> Offsets:
        found = await self._admin.list_offsets(timestamps, isolation_level=self._options.isolation_level)
        return {where: answer.offset for where, answer in found.items()}

    async def _find_partitions(self) -> list[TopicPartition]:
        if time.monotonic() - self._partitions_at < METADATA_MAX_AGE_S:
            return self._partitions
        partitions: list[TopicPartition] = []
        for name in self._options.topics:
            self._cluster.forget_topic(name)
            topic = await self._cluster.topic(name)
            partitions += [TopicPartition(name, each.partition) for each in topic.partitions]
        self._partitions, self._partitions_at = sorted(partitions), time.monotonic()
        return self._partitions

    # Batches

    def check_nothing_lost(self, start: Mapping[TopicPartition, int], latest: Offsets) -> None:
        """What was read before must be there still; else the topic was deleted, or made anew, or cut."""
        for where, offset in start.items():
            end = latest.get(where)
            if end is None:
                self._report_loss(f"{where} was read up to offset {offset}, and is gone")
            elif end < offset:
                self._report_loss(f"{where} was read up to offset {offset}, and ends at {end} now")

    def check_first_is_whole(self, moved: Offsets) -> None:
        """A first batch that is run again, and is not empty, began at 0: not where these logs begin now."""
        for where, offset in moved.items():
            self._report_loss(
                f"{where} begins at offset {offset} now, and the first batch of this query may have begun "
                "before it: it is run again, and nobody remembers"
            )

    def plan(
        self, start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
    ) -> list[OffsetRange]:
        """The ranges from start to end. Partitions without a start are new, and read from their beginning."""
        added = [where for where in end if where not in start]
        begins = self._run(partial(self._find, dict.fromkeys(added, EARLIEST))) if added else {}
        for where, offset in begins.items():
            if offset > 0:
                self._report_loss(f"{where} is new to this query, and begins at offset {offset} already")
        starts = {**begins, **start}
        ranges = [
            OffsetRange(where, starts[where], end[where])
            for where in sorted(end)
            if starts[where] < end[where]
        ]
        return split(ranges, self._options.min_partitions or 0)

    def _report_loss(self, what: str) -> None:
        report_loss(what, is_error=self._options.fail_on_data_loss)

    def _run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return self._runner.run(self._cluster.retry(attempt, timeout_ms=RETRY_TIMEOUT_MS))


def _check_all_named(name: str, given: Offsets, partitions: list[TopicPartition]) -> None:
    missing = to_json({where: 0 for where in partitions if where not in given})
    unknown = to_json({where: 0 for where in given if where not in partitions})
    if missing or unknown:
        raise ConfigError(
            f"{name} must name every partition and no other: "
            + "; ".join(
                f"{what} {', '.join(f'{topic} {list(numbers)}' for topic, numbers in topics.items())}"
                for what, topics in (("it lacks", missing), ("there is no", unknown))
                if topics
            )
        )
