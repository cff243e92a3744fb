"""What is read from a query's checkpoint: its id, its next batch, what a batch reads, whether there is state.

Spark writes `offsets/<batch>` before it runs the batch, and never changes it: a version, a line of metadata,
and one line for each source. It is read through Hadoop's file systems, as Spark does, so that it may be
anywhere.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError
from semel.sinks.marker import Start
from semel.spark.source_offsets import of_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

METADATA: Final = "metadata"
OFFSETS: Final = "offsets"
COMMITS: Final = "commits"
STATE: Final = "state"
# The version and the metadata, which holds the time of planning.
HEADER_LINES: Final = 2


@dataclass(slots=True, frozen=True)
class BatchOffsets:
    """How far a batch reads its sources, one line for each."""

    sources: tuple[str, ...]

    @property
    def digest(self) -> str:
        return sha256("\n".join(self.sources).encode()).hexdigest()

    def by_topic(self) -> dict[str, dict[int, int]]:
        """The next offset of every partition, for those sources that are topics.

        Where several sources read a partition it is the least: what one of them has yet to read is lag.
        """
        merged: dict[str, dict[int, int]] = {}
        for line in self.sources:
            for where, offset in (of_source(_without_name(line)) or {}).items():
                partitions = merged.setdefault(where.topic, {})
                partitions[where.partition] = min(offset, partitions.get(where.partition, offset))
        return merged


def parse_offsets(text: str) -> BatchOffsets:
    """The content of `offsets/<batch>`."""
    lines = text.splitlines()
    if len(lines) < HEADER_LINES or not lines[0].startswith("v"):
        raise ConfigError(f"the checkpoint's offsets are in no format that is known: {text[:80]!r}")
    return BatchOffsets(tuple(lines[HEADER_LINES:]))


def _without_name(line: str) -> str:
    """From version 2 on (`spark.sql.streaming.offsetLog.formatVersion`) a line begins with its source's."""
    return line[max(line.find("{"), 0) :]


class Checkpoint:
    """The directory of one query."""

    def __init__(self, spark: "SparkSession", location: str) -> None:
        # PySpark has no typed way to Hadoop's file systems.
        session: Any = spark
        self._jvm: Any = session.sparkContext._jvm
        self._root: Any = self._jvm.org.apache.hadoop.fs.Path(location)
        # With what was set on the session, as Spark takes it.
        self._files: Any = self._root.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())

    def query_id(self) -> str:
        """Empty if no query has run yet."""
        return str(json.loads(self._read(METADATA))["id"]) if self._exists(METADATA) else ""

    def start(self) -> Start:
        """What Spark begins with: the batch that is planned and not committed, or the one after those."""
        last = self._last_planned()
        is_planned = last >= 0 and not self._exists(COMMITS, str(last))
        return Start(last if is_planned else last + 1, self.query_id(), is_planned)

    def _last_planned(self) -> int:
        if not self._exists(OFFSETS):
            return -1
        names = [str(each.getPath().getName()) for each in self._files.listStatus(self._path(OFFSETS))]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def offsets(self, batch_id: int) -> BatchOffsets:
        """What the batch reads; it is there before the batch runs."""
        return parse_offsets(self._read(OFFSETS, str(batch_id)))

    def has_state(self) -> bool:
        """Whether operators of the query keep state, whose store must see every batch."""
        return self._exists(STATE)

    def _exists(self, *parts: str) -> bool:
        return bool(self._files.exists(self._path(*parts)))

    def _read(self, *parts: str) -> str:
        stream = self._files.open(self._path(*parts))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def _path(self, *parts: str) -> Any:
        path = self._root
        for part in parts:
            path = self._jvm.org.apache.hadoop.fs.Path(path, part)
        return path
