"""DescribeLogDirs (35): how much each partition takes up, and how much room is left."""

from __future__ import annotations

from pathlib import Path

from semel.broker.topics import Partition
from semel.disk import Disk
from semel.server.life import Life
from semel.wire.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)


def describe_log_dirs(
    life: Life, directory: str, disk: Disk | None, request: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    wanted = None
    if request.topics is not None:
        wanted = {topic.topic: set(topic.partitions) for topic in request.topics}
    topics = []
    for topic in life.broker.catalog:
        if wanted is not None and topic.name not in wanted:
            continue
        chosen = [
            partition
            for partition in topic.partitions
            if wanted is None or partition.index in wanted[topic.name]
        ]
        topics.append(
            DescribeLogDirsTopic(
                name=topic.name, partitions=[_described(life, partition) for partition in chosen]
            )
        )
    result = DescribeLogDirsResult(log_dir=directory, topics=topics)
    if disk is not None:
        result.usable_bytes = disk.free_bytes(Path(directory))
        result.total_bytes = result.usable_bytes + sum(
            partition.partition_size for topic in topics for partition in topic.partitions
        )
    return DescribeLogDirsResponse(results=[result])


def _described(life: Life, partition: Partition) -> DescribeLogDirsPartition:
    view = life.store.partition(partition.topic.topic_id, partition.index)
    return DescribeLogDirsPartition(partition_index=partition.index, partition_size=view.size_bytes)
