"""DescribeLogDirs (35), AlterReplicaLogDirs (34): what each partition takes up, and what room is left.

There is one log directory, so a replica can only be asked to be where it is.
"""

from __future__ import annotations

from pathlib import Path

from semel.broker.topics import Partition
from semel.disk import Disk
from semel.server.life import Life
from semel.wire.errors import ErrorCode
from semel.wire.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
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


def alter_replica_log_dirs(
    life: Life, directory: str, request: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(
                topic_name=topic.name,
                partitions=[
                    AlterReplicaLogDirPartitionResult(
                        partition_index=index,
                        error_code=_refuses_move(life, directory, wanted.path, topic.name, index),
                    )
                    for index in topic.partitions
                ],
            )
            for wanted in request.dirs
            for topic in wanted.topics
        ]
    )


def _refuses_move(life: Life, directory: str, path: str, name: str, index: int) -> ErrorCode:
    if life.broker.catalog.partition(name, index) is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return ErrorCode.NONE if path == directory else ErrorCode.LOG_DIR_NOT_FOUND
