"""Administration: topics, partitions, configs, offsets and the cluster itself.

Each call is one request, sent to the broker that it concerns and retried while the answer says that a later
attempt may succeed. Calls that name many things fail with the first thing that was refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from semel.client.cluster import Cluster
from semel.client.errors import check
from semel.client.metadata import ClusterView, Topic, TopicPartition, topic_view
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from semel.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from semel.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from semel.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from semel.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from semel.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

BROKER_DEFAULT: Final = -1
CHANGE_TIMEOUT_MS: Final = 30_000

# Timestamps with a meaning in ListOffsets.
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

NO_REPLICA_ID: Final = -1
# Later versions name topics by id; names are what callers have.
DELETE_TOPICS_VERSION: Final = 5

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
SET_CONFIG: Final = 0
DELETE_CONFIG: Final = 1

CONFIG_SOURCES: Final = {
    1: "topic",
    2: "broker",
    3: "cluster",
    4: "static",
    5: "default",
    6: "logger",
    8: "group",
}


@dataclass(slots=True, frozen=True)
class ConfigEntry:
    """One config and where its value comes from; a sensitive one has no value."""

    name: str
    value: str | None
    source: str
    is_read_only: bool
    is_sensitive: bool

    @property
    def is_default(self) -> bool:
        return self.source == "default"


@dataclass(slots=True, frozen=True)
class FoundOffset:
    """An answer of ListOffsets; the offset is -1 where nothing was found."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class Admin:
    """Administration of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # Topics

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int = BROKER_DEFAULT,
        replication_factor: int = BROKER_DEFAULT,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> int | None:
        """Creates a topic; returns how many partitions it has, or None where the broker does not say."""
        topic = CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=replication_factor,
            configs=[CreatableTopicConfig(name=key, value=value) for key, value in (configs or {}).items()],
        )
        request = CreateTopicsRequest(
            topics=[topic], timeout_ms=CHANGE_TIMEOUT_MS, validate_only=validate_only
        )
        created = await self._cluster.retry(partial(self._create_topic, request), repeatable=False)
        total = max(partitions, created.num_partitions)
        return None if total == BROKER_DEFAULT else total

    async def _create_topic(self, request: CreateTopicsRequest) -> CreatableTopicResult:
        connection = await self._cluster.controller()
        response = await connection.request(request, CreateTopicsResponse)
        (result,) = response.topics
        check(result.error_code, f"topic {result.name!r} was not created", result.error_message)
        return result

    async def delete_topics(self, names: Sequence[str]) -> None:
        request = DeleteTopicsRequest(topic_names=list(names), timeout_ms=CHANGE_TIMEOUT_MS)
        await self._cluster.retry(partial(self._delete_topics, request), repeatable=False)

    async def _delete_topics(self, request: DeleteTopicsRequest) -> None:
        connection = await self._cluster.controller()
        response = await connection.request(request, DeleteTopicsResponse, max_version=DELETE_TOPICS_VERSION)
        for result in response.responses:
            if result.name is not None:
                self._cluster.forget_topic(result.name)
            check(result.error_code, f"topic {result.name!r} was not deleted", result.error_message)

    async def create_partitions(self, name: str, total: int) -> None:
        """Raises the number of partitions of a topic to the total."""
        topic = CreatePartitionsTopic(name=name, count=total, assignments=None)
        request = CreatePartitionsRequest(topics=[topic], timeout_ms=CHANGE_TIMEOUT_MS)
        await self._cluster.retry(partial(self._create_partitions, request), repeatable=False)

    async def _create_partitions(self, request: CreatePartitionsRequest) -> None:
        connection = await self._cluster.controller()
        response = await connection.request(request, CreatePartitionsResponse)
        for result in response.results:
            self._cluster.forget_topic(result.name)
            check(result.error_code, f"topic {result.name!r} got no partitions", result.error_message)

    async def list_topics(self, *, include_internal: bool = False) -> list[Topic]:
        """All topics, by name."""
        response = await self._cluster.retry(partial(self._cluster.metadata, None))
        topics = [topic_view(topic) for topic in response.topics if topic.error_code == ErrorCode.NONE]
        shown = [topic for topic in topics if include_internal or not topic.is_internal]
        return sorted(shown, key=_topic_name)

    async def describe_topic(self, name: str) -> Topic:
        """A topic as it is now."""
        return await self._cluster.retry(partial(self._describe_topic, name))

    async def _describe_topic(self, name: str) -> Topic:
        self._cluster.forget_topic(name)
        return await self._cluster.topic(name)

    # Configs

    async def topic_configs(self, name: str) -> list[ConfigEntry]:
        return await self._cluster.retry(partial(self._describe_configs, TOPIC_RESOURCE, name))

    async def broker_configs(self, node_id: int) -> list[ConfigEntry]:
        return await self._cluster.retry(partial(self._describe_configs, BROKER_RESOURCE, str(node_id)))

    async def _describe_configs(self, kind: int, name: str) -> list[ConfigEntry]:
        if kind == BROKER_RESOURCE:
            connection = await self._cluster.connection(int(name))
        else:
            connection = await self._cluster.any_connection()
        resource = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
        response = await connection.request(
            DescribeConfigsRequest(resources=[resource]), DescribeConfigsResponse
        )
        entries: list[ConfigEntry] = []
        for result in response.results:
            check(result.error_code, f"the configs of {name!r} could not be read", result.error_message)
            for config in result.configs:
                source = CONFIG_SOURCES.get(config.config_source, "unknown")
                entries.append(
                    ConfigEntry(config.name, config.value, source, config.read_only, config.is_sensitive)
                )
        return sorted(entries, key=_config_name)

    async def alter_topic_configs(
        self, name: str, *, assign: Mapping[str, str] | None = None, remove: Iterable[str] = ()
    ) -> None:
        """Sets some configs of a topic and takes others back to their defaults; the rest stays."""
        changes = [
            AlterableConfig(name=key, config_operation=SET_CONFIG, value=value)
            for key, value in (assign or {}).items()
        ]
        changes += [AlterableConfig(name=key, config_operation=DELETE_CONFIG, value=None) for key in remove]
        resource = AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configs=changes)
        request = IncrementalAlterConfigsRequest(resources=[resource])
        await self._cluster.retry(partial(self._alter_configs, request))

    async def _alter_configs(self, request: IncrementalAlterConfigsRequest) -> None:
        connection = await self._cluster.controller()
        response = await connection.request(request, IncrementalAlterConfigsResponse)
        for result in response.responses:
            check(
                result.error_code,
                f"the configs of {result.resource_name!r} were not changed",
                result.error_message,
            )

    # Offsets

    async def list_offsets(
        self, wanted: Mapping[TopicPartition, int], *, isolation_level: int = READ_UNCOMMITTED
    ) -> dict[TopicPartition, FoundOffset]:
        """Finds the first offset at or after a timestamp, or at EARLIEST, LATEST or MAX_TIMESTAMP."""
        return await self._cluster.retry(partial(self._list_offsets, wanted, isolation_level))

    async def _list_offsets(
        self, wanted: Mapping[TopicPartition, int], isolation_level: int
    ) -> dict[TopicPartition, FoundOffset]:
        found: dict[TopicPartition, FoundOffset] = {}
        for leader_id, partitions in (await self._by_leader(wanted)).items():
            connection = await self._cluster.connection(leader_id)
            topics = [
                ListOffsetsTopic(
                    name=topic,
                    partitions=[
                        ListOffsetsPartition(
                            partition_index=index, timestamp=wanted[TopicPartition(topic, index)]
                        )
                        for index in indexes
                    ],
                )
                for topic, indexes in partitions.items()
            ]
            request = ListOffsetsRequest(
                replica_id=NO_REPLICA_ID,
                isolation_level=isolation_level,
                topics=topics,
                timeout_ms=CHANGE_TIMEOUT_MS,
            )
            response = await connection.request(request, ListOffsetsResponse)
            for topic in response.topics:
                for answer in topic.partitions:
                    where = TopicPartition(topic.name, answer.partition_index)
                    check(answer.error_code, f"the offsets of {where} could not be read")
                    found[where] = FoundOffset(answer.offset, answer.timestamp, answer.leader_epoch)
        return found

    async def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Deletes the records before these offsets (LATEST: all); answers with the new log start offsets."""
        return await self._cluster.retry(partial(self._delete_records, before))

    async def _delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        low_watermarks: dict[TopicPartition, int] = {}
        for leader_id, partitions in (await self._by_leader(before)).items():
            connection = await self._cluster.connection(leader_id)
            topics = [
                DeleteRecordsTopic(
                    name=topic,
                    partitions=[
                        DeleteRecordsPartition(
                            partition_index=index, offset=before[TopicPartition(topic, index)]
                        )
                        for index in indexes
                    ],
                )
                for topic, indexes in partitions.items()
            ]
            request = DeleteRecordsRequest(topics=topics, timeout_ms=CHANGE_TIMEOUT_MS)
            response = await connection.request(request, DeleteRecordsResponse)
            for topic in response.topics:
                for answer in topic.partitions:
                    where = TopicPartition(topic.name, answer.partition_index)
                    check(answer.error_code, f"records of {where} were not deleted")
                    low_watermarks[where] = answer.low_watermark
        return low_watermarks

    async def _by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int, dict[str, list[int]]]:
        """Leader to topic to partitions: who has to be asked about what."""
        grouped: dict[int, dict[str, list[int]]] = {}
        for where in partitions:
            leader_id = await self._cluster.leader_id(where)
            grouped.setdefault(leader_id, {}).setdefault(where.topic, []).append(where.partition)
        return grouped

    # The cluster

    async def describe_cluster(self) -> ClusterView:
        return await self._cluster.retry(self._cluster.view)


def config_value(entries: Iterable[ConfigEntry], name: str) -> str | None:
    """The value of one of these configs; None where it is not among them, or is secret."""
    for entry in entries:
        if entry.name == name:
            return entry.value
    return None


def _topic_name(topic: Topic) -> str:
    return topic.name


def _config_name(entry: ConfigEntry) -> str:
    return entry.name
