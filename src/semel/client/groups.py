"""Consumer groups as tools see them: which there are, who is in them, and how to do away with them.

Groups live at their coordinators, so every broker is asked for its own. There are two protocols for
members: the classic one, and that of KIP-848; a group of the newer kind is unknown to the older call, so
both are tried.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from semel.client.cluster import GROUP_COORDINATOR, Cluster
from semel.client.connection import Connection
from semel.client.errors import check
from semel.client.metadata import TopicPartition
from semel.errors import ProtocolError
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages import consumer_group_describe as modern
from semel.wire.messages import describe_groups as classic
from semel.wire.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from semel.wire.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from semel.wire.messages.list_groups import ListGroupsRequest, ListGroupsResponse

CONSUMER_PROTOCOL: Final = "consumer"
DEAD: Final = "Dead"
CLASSIC_TYPE: Final = "classic"
CONSUMER_TYPE: Final = "consumer"
_PREFIX_BYTES: Final = 2
"""An assignment begins with the version of its format."""


@dataclass(slots=True, frozen=True)
class ListedGroup:
    """A group in a list; what an old broker does not tell is empty."""

    group_id: str
    state: str
    kind: str
    protocol_type: str
    coordinator_id: int


@dataclass(slots=True, frozen=True)
class Member:
    """One member, and what it reads."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(slots=True, frozen=True)
class DescribedGroup:
    """A group and its members; one that nobody knows is Dead."""

    group_id: str
    state: str
    kind: str
    assignor: str
    members: tuple[Member, ...]

    @property
    def exists(self) -> bool:
        return self.state != DEAD


async def list_groups(cluster: Cluster) -> list[ListedGroup]:
    """All groups of all coordinators, by id."""
    return await cluster.retry(partial(_list_groups, cluster))


async def _list_groups(cluster: Cluster) -> list[ListedGroup]:
    found: list[ListedGroup] = []
    for broker in (await cluster.view()).brokers:
        connection = await cluster.connection(broker.node_id)
        response = await connection.request(ListGroupsRequest(), ListGroupsResponse)
        check(response.error_code, f"the groups of broker {broker.node_id} could not be listed")
        found += [
            ListedGroup(
                group.group_id,
                group.group_state,
                group.group_type.lower(),
                group.protocol_type,
                broker.node_id,
            )
            for group in response.groups
        ]
    return sorted(found, key=_group_id)


def _group_id(group: ListedGroup) -> str:
    return group.group_id


async def describe_group(cluster: Cluster, group_id: str) -> DescribedGroup:
    """A group as its coordinator has it."""
    return await cluster.retry(partial(_describe_group, cluster, group_id))


async def _describe_group(cluster: Cluster, group_id: str) -> DescribedGroup:
    connection = await cluster.coordinator(GROUP_COORDINATOR, group_id)
    if ApiKey.CONSUMER_GROUP_DESCRIBE in connection.versions:
        found = await _describe_modern(connection, group_id)
        if found is not None:
            return found
    return await _describe_classic(connection, group_id)


async def _describe_modern(connection: Connection, group_id: str) -> DescribedGroup | None:
    request = modern.ConsumerGroupDescribeRequest(group_ids=[group_id])
    response = await connection.request(request, modern.ConsumerGroupDescribeResponse)
    group = response.groups[0]
    if group.error_code in (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION):
        return None
    check(group.error_code, f"group {group_id!r} could not be described", group.error_message)
    members = tuple(
        Member(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host.lstrip("/"),
            tuple(
                TopicPartition(topic.topic_name, index)
                for topic in member.assignment.topic_partitions
                for index in topic.partitions
            ),
        )
        for member in group.members
    )
    return DescribedGroup(group_id, group.group_state, CONSUMER_TYPE, group.assignor_name, members)


async def _describe_classic(connection: Connection, group_id: str) -> DescribedGroup:
    request = classic.DescribeGroupsRequest(groups=[group_id])
    response = await connection.request(request, classic.DescribeGroupsResponse)
    group = response.groups[0]
    if group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
        return DescribedGroup(group_id, DEAD, CLASSIC_TYPE, "", ())
    check(group.error_code, f"group {group_id!r} could not be described", group.error_message)
    is_consumer = group.protocol_type == CONSUMER_PROTOCOL
    members = tuple(
        Member(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host.lstrip("/"),
            _assigned(member.member_assignment) if is_consumer else (),
        )
        for member in group.members
    )
    return DescribedGroup(group_id, group.group_state, CLASSIC_TYPE, group.protocol_data, members)


def _assigned(assignment: bytes | memoryview) -> tuple[TopicPartition, ...]:
    """What a member was assigned; nothing where its format is not Kafka's own."""
    if len(assignment) < _PREFIX_BYTES:
        return ()
    view = memoryview(assignment)
    version = min(int.from_bytes(view[:_PREFIX_BYTES]), ConsumerProtocolAssignment.MAX_VERSION)
    try:
        decoded, _ = ConsumerProtocolAssignment.decode(view, _PREFIX_BYTES, version)
    except ProtocolError:
        return ()
    return tuple(
        TopicPartition(topic.topic, index)
        for topic in decoded.assigned_partitions
        for index in topic.partitions
    )


async def delete_group(cluster: Cluster, group_id: str) -> None:
    """Deletes a group that has no members, with its offsets."""
    await cluster.retry(partial(_delete_group, cluster, group_id), repeatable=False)


async def _delete_group(cluster: Cluster, group_id: str) -> None:
    connection = await cluster.coordinator(GROUP_COORDINATOR, group_id)
    request = DeleteGroupsRequest(groups_names=[group_id])
    response = await connection.request(request, DeleteGroupsResponse)
    for result in response.results:
        check(result.error_code, f"group {group_id!r} was not deleted")
