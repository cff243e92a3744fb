"""Whether the pipeline has nothing left to do: by its checkpoint, and not by how much has come out.

Whoever counts what comes out, and looks away when it is enough, does not see what comes out twice after that.
"""

from __future__ import annotations

from pathlib import Path

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.spark.checkpoint import parse_offsets


async def has_caught_up(cluster: Cluster, topic: str, checkpoint: Path) -> bool:
    """Whether all of the topic, up to its last stable offsets, is in batches that are finished."""
    finished = finished_offsets(checkpoint, topic)
    if not finished:
        return False
    admin = Admin(cluster)
    partitions = (await admin.describe_topic(topic)).partitions
    wanted = {TopicPartition(topic, each.partition): LATEST for each in partitions}
    ends = await admin.list_offsets(wanted, isolation_level=READ_COMMITTED)
    return all(finished.get(where.partition, 0) >= end.offset for where, end in ends.items())


def finished_offsets(checkpoint: Path, topic: str) -> dict[int, int]:
    """The next offset of every partition; none while a batch is planned and not finished."""
    planned, finished = _last(checkpoint / "offsets"), _last(checkpoint / "commits")
    if planned is None or planned != finished:
        return {}
    return parse_offsets((checkpoint / "offsets" / str(planned)).read_text()).by_topic().get(topic, {})


def _last(log: Path) -> int | None:
    """The last batch in one of Spark's logs; files that are being written have other names."""
    batches = [int(path.name) for path in log.glob("*") if path.name.isdecimal()]
    return max(batches, default=None)
