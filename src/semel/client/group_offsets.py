"""A consumer group's offsets, read and written without being a member of it.

`fetch_offsets` waits, unless told otherwise, until no open transaction has offsets of these partitions
pending: what it returns is then the outcome of every transaction that was begun before.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

from semel.client.cluster import DEFAULT_RETRY_TIMEOUT_MS, GROUP_COORDINATOR, Cluster
from semel.client.connection import Connection
from semel.client.errors import UnsupportedRequestError, check
from semel.client.metadata import TopicPartition
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)

NO_GENERATION: Final = -1
NO_LEADER_EPOCH: Final = -1
NO_OFFSET: Final = -1
# Later versions ask for several groups at once, or name topics by id.
OFFSET_FETCH_VERSION: Final = 7
OFFSET_COMMIT_VERSION: Final = 8
REQUIRE_STABLE_SINCE: Final = 7


class CommittedOffset(NamedTuple):
    """Where a group goes on reading, with a note of at most 4,096 bytes."""

    offset: int
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH


class GroupMetadata(NamedTuple):
    """Who commits: a member of a group in a generation (KIP-447), or nobody in particular."""

    group_id: str
    generation_id: int = NO_GENERATION
    member_id: str = ""
    group_instance_id: str | None = None


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partitions as requests list them."""
    grouped: dict[str, list[int]] = {}
    for where in partitions:
        grouped.setdefault(where.topic, []).append(where.partition)
    return grouped


async def fetch_offsets(
    cluster: Cluster,
    group_id: str,
    partitions: Iterable[TopicPartition] | None = None,
    *,
    require_stable: bool = True,
    timeout_ms: int = DEFAULT_RETRY_TIMEOUT_MS,
) -> dict[TopicPartition, CommittedOffset]:
    """The committed offsets of these partitions; partitions without one are left out.

    None asks for all that the group has. A partition whose first offset is pending is not among them, so
    whoever needs certainty names the partitions.
    """
    topics = None
    if partitions is not None:
        topics = [
            OffsetFetchRequestTopic(name=name, partition_indexes=indexes)
            for name, indexes in by_topic(partitions).items()
        ]
    request = OffsetFetchRequest(group_id=group_id, topics=topics, require_stable=require_stable)
    return await cluster.retry(partial(_fetch_offsets, cluster, request), timeout_ms=timeout_ms)


async def _fetch_offsets(
    cluster: Cluster, request: OffsetFetchRequest
) -> dict[TopicPartition, CommittedOffset]:
    connection = await cluster.coordinator(GROUP_COORDINATOR, request.group_id)
    if request.require_stable:
        _check_knows_stable(connection, request)
    response = await connection.request(request, OffsetFetchResponse, max_version=OFFSET_FETCH_VERSION)
    what = f"the offsets of group {request.group_id!r} could not be read"
    check(response.error_code, what)
    found: dict[TopicPartition, CommittedOffset] = {}
    for topic in response.topics:
        for answer in topic.partitions:
            check(answer.error_code, what)
            if answer.committed_offset != NO_OFFSET:
                found[TopicPartition(topic.name, answer.partition_index)] = CommittedOffset(
                    answer.committed_offset, answer.metadata or "", answer.committed_leader_epoch
                )
    return found


def _check_knows_stable(connection: Connection, request: OffsetFetchRequest) -> None:
    if connection.version_of(request, OFFSET_FETCH_VERSION) < REQUIRE_STABLE_SINCE:
        raise UnsupportedRequestError(
            f"{connection.peer} cannot say whether offsets are stable (OffsetFetch v{REQUIRE_STABLE_SINCE}, "
            "Kafka 2.5): exactly-once needs a newer broker"
        )


async def commit_offsets(
    cluster: Cluster,
    group: GroupMetadata,
    offsets: Mapping[TopicPartition, CommittedOffset],
) -> None:
    """Commits offsets outside of any transaction."""
    topics = [
        OffsetCommitRequestTopic(
            name=name,
            partitions=[
                OffsetCommitRequestPartition(
                    partition_index=index,
                    committed_offset=offsets[TopicPartition(name, index)].offset,
                    committed_leader_epoch=offsets[TopicPartition(name, index)].leader_epoch,
                    committed_metadata=offsets[TopicPartition(name, index)].metadata,
                )
                for index in indexes
            ],
        )
        for name, indexes in by_topic(offsets).items()
    ]
    request = OffsetCommitRequest(
        group_id=group.group_id,
        generation_id_or_member_epoch=group.generation_id,
        member_id=group.member_id,
        group_instance_id=group.group_instance_id,
        topics=topics,
    )
    await cluster.retry(partial(_commit_offsets, cluster, request))


async def _commit_offsets(cluster: Cluster, request: OffsetCommitRequest) -> None:
    connection = await cluster.coordinator(GROUP_COORDINATOR, request.group_id)
    response = await connection.request(request, OffsetCommitResponse, max_version=OFFSET_COMMIT_VERSION)
    for topic in response.topics:
        for answer in topic.partitions:
            where = TopicPartition(topic.name, answer.partition_index)
            check(answer.error_code, f"group {request.group_id!r} could not commit its offset of {where}")
