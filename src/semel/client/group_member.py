"""A member of a consumer group by the classic protocol, and the assignment when it leads.

Rules:

- `join` enters the next generation and returns the partitions of this member; `heartbeat` says whether the
  group still stands, and whether it is time to join again. Both have a lane of their own: JoinGroup is
  answered when everybody has come.
- The leader assigns cooperatively: a partition that somebody has stays there, or is taken from it and then
  free in the round after. Members name what they have (`owned`) when they join. Whoever gets less than it
  named gives up the rest and joins again.
- `Assignment.is_continuous` is False if this member may have missed a generation: others may have had its
  partitions in between, whatever it was given now.
- The protocol's name is the caller's. Members with other protocols cannot be in the same group.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from semel.client.cluster import GROUP_COORDINATOR, Cluster
from semel.client.connection import Connection
from semel.client.errors import check
from semel.client.group_offsets import NO_GENERATION, GroupMetadata, by_topic
from semel.client.metadata import TopicPartition
from semel.errors import FatalError, ProtocolError, RetriableError
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from semel.wire.messages.consumer_protocol_assignment import TopicPartition as AssignedTopic
from semel.wire.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from semel.wire.messages.consumer_protocol_subscription import TopicPartition as OwnedTopic
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from semel.wire.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from semel.wire.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from semel.wire.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)
from semel.wire.primitives import Splices

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
# With the owned partitions (since 1) and the generation they are of (since 2).
SUBSCRIPTION_VERSION: Final = 2
ASSIGNMENT_VERSION: Final = 0
PREFIX_BYTES: Final = 2
"""Subscription and assignment begin with the version of their format."""
MAX_ROUNDS: Final = 100
"""Joins in one call that end with the news that another rebalance has begun."""

_REJOIN: Final = frozenset(
    {ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID}
)


@dataclass(slots=True, frozen=True)
class MemberOptions:
    """A member is out when it is silent for its session; it has the rebalance timeout to join again."""

    session_timeout_ms: int = 10_000
    rebalance_timeout_ms: int = 60_000
    instance_id: str | None = None


class Standing(Enum):
    """What a heartbeat says."""

    STABLE = "stable"
    REBALANCING = "rebalancing"  # join again; what is assigned may be kept until then
    OUT = "out"  # no member any more: others may have the partitions


class Assignment(NamedTuple):
    generation_id: int
    partitions: frozenset[TopicPartition]
    is_continuous: bool


class Claim(NamedTuple):
    """What a member tells the leader: what it reads, and what it has, since when."""

    topics: frozenset[str]
    owned: frozenset[TopicPartition]
    generation_id: int


class GroupMember:
    """One member. Not for use by several tasks at once."""

    def __init__(
        self,
        cluster: Cluster,
        group_id: str,
        topics: Iterable[str],
        protocol: str,
        options: MemberOptions | None = None,
    ) -> None:
        self.options = options or MemberOptions()
        self.group_id = group_id
        self.topics = sorted(topics)
        self._cluster = cluster
        self._protocol = protocol
        self._lane = f"member of {group_id}"
        self._member_id = ""
        self._generation_id = NO_GENERATION
        self.is_leader = False

    @property
    def metadata(self) -> GroupMetadata:
        """Who commits (KIP-447)."""
        return GroupMetadata(self.group_id, self._generation_id, self._member_id, self.options.instance_id)

    async def join(self, owned: Iterable[TopicPartition]) -> Assignment:
        """Enters the next generation, waiting for the other members; returns what is assigned here."""
        kept = frozenset(owned)
        last_id, last_generation_id = self._member_id, self._generation_id
        for _ in range(MAX_ROUNDS):
            joined = await self._cluster.retry(partial(self._join, kept), timeout_ms=self._patience_ms)
            if joined is None:
                continue
            partitions = await self._cluster.retry(partial(self._sync, joined), timeout_ms=self._patience_ms)
            if partitions is None:
                continue
            is_continuous = self._member_id == last_id and self._generation_id == last_generation_id + 1
            return Assignment(self._generation_id, partitions, is_continuous)
        raise RetriableError(
            f"group {self.group_id!r} has rebalanced {MAX_ROUNDS} times without coming to an end: members "
            "come and go too fast",
            ErrorCode.REBALANCE_IN_PROGRESS,
        )

    @property
    def _patience_ms(self) -> int:
        return self.options.rebalance_timeout_ms + self._cluster.options.request_timeout_ms

    async def _join(self, owned: frozenset[TopicPartition]) -> JoinGroupResponse | None:
        """None: to be tried again, under the id that is known by now."""
        connection = await self._connection()
        request = JoinGroupRequest(
            group_id=self.group_id,
            session_timeout_ms=self.options.session_timeout_ms,
            rebalance_timeout_ms=self.options.rebalance_timeout_ms,
            member_id=self._member_id,
            group_instance_id=self.options.instance_id,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            protocols=[JoinGroupRequestProtocol(self._protocol, self._subscription(owned))],
        )
        response = await connection.request(request, JoinGroupResponse, timeout_ms=self._patience_ms)
        if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = response.member_id
            return None
        if response.error_code in _REJOIN:
            self._forget_id(response.error_code)
            return None
        if response.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
            raise FatalError(
                f"group {self.group_id!r} has members that do not speak {self._protocol!r}: ordinary "
                "consumers, perhaps; use another group id",
                response.error_code,
            )
        check(response.error_code, f"group {self.group_id!r} could not be joined")
        self._member_id = response.member_id
        self._generation_id = response.generation_id
        self.is_leader = response.leader == response.member_id
        return response

    async def _sync(self, joined: JoinGroupResponse) -> frozenset[TopicPartition] | None:
        connection = await self._connection()
        assignments: list[SyncGroupRequestAssignment] = []
        if self.is_leader and not joined.skip_assignment:
            assignments = await self._assign(joined.members)
        request = SyncGroupRequest(
            group_id=self.group_id,
            generation_id=self._generation_id,
            member_id=self._member_id,
            group_instance_id=self.options.instance_id,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            protocol_name=self._protocol,
            assignments=assignments,
        )
        response = await connection.request(request, SyncGroupResponse, timeout_ms=self._patience_ms)
        if response.error_code in _REJOIN:
            self._forget_id(response.error_code)
            return None
        check(response.error_code, f"group {self.group_id!r} gave no assignment")
        return decode_assignment(response.assignment)

    async def _assign(self, members: list[JoinGroupResponseMember]) -> list[SyncGroupRequestAssignment]:
        claims = {member.member_id: decode_claim(member.metadata) for member in members}
        topics = sorted({topic for claim in claims.values() for topic in claim.topics})
        response = await self._cluster.metadata(topics)
        counts = {
            topic.name: len(topic.partitions)
            for topic in response.topics
            if topic.name is not None and topic.error_code == ErrorCode.NONE
        }
        return [
            SyncGroupRequestAssignment(member_id, encode_assignment(partitions))
            for member_id, partitions in assign(claims, counts).items()
        ]

    async def heartbeat(self) -> Standing:
        """Shows that this member lives. What may pass (no coordinator) is raised as RetriableError."""
        connection = await self._connection()
        request = HeartbeatRequest(
            self.group_id, self._generation_id, self._member_id, self.options.instance_id
        )
        response = await connection.request(
            request, HeartbeatResponse, timeout_ms=self.options.session_timeout_ms
        )
        if response.error_code == ErrorCode.REBALANCE_IN_PROGRESS:
            return Standing.REBALANCING
        if response.error_code in _REJOIN:
            return Standing.OUT
        if response.error_code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._cluster.forget_coordinator(GROUP_COORDINATOR, self.group_id)
        check(response.error_code, f"a heartbeat of group {self.group_id!r} was refused")
        return Standing.STABLE

    async def leave(self) -> None:
        """Gives the place up, so that nobody waits for it."""
        if not self._member_id or self.options.instance_id is not None:
            return
        connection = await self._connection()
        request = LeaveGroupRequest(
            group_id=self.group_id,
            members=[MemberIdentity(self._member_id)],
            member_id=self._member_id,
        )
        await connection.request(request, LeaveGroupResponse)
        self._member_id = ""

    def forget_coordinator(self) -> None:
        self._cluster.forget_coordinator(GROUP_COORDINATOR, self.group_id)

    async def _connection(self) -> Connection:
        node_id = await self._cluster.coordinator_id(GROUP_COORDINATOR, self.group_id)
        return await self._cluster.connection(node_id, self._lane)

    def _subscription(self, owned: frozenset[TopicPartition]) -> bytes:
        subscription = ConsumerProtocolSubscription(
            topics=self.topics,
            owned_partitions=[OwnedTopic(name, indexes) for name, indexes in by_topic(sorted(owned)).items()],
            generation_id=self._generation_id,
        )
        out = bytearray(SUBSCRIPTION_VERSION.to_bytes(PREFIX_BYTES))
        subscription.encode(out, SUBSCRIPTION_VERSION, _no_splices())
        return bytes(out)

    def _forget_id(self, code: int) -> None:
        if code == ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""


def assign(claims: Mapping[str, Claim], counts: Mapping[str, int]) -> dict[str, list[TopicPartition]]:
    """Who gets what: everybody about as many, as little moved as possible, and nothing that another has."""
    partitions = [TopicPartition(topic, index) for topic in sorted(counts) for index in range(counts[topic])]
    given: dict[str, list[TopicPartition]] = {member: [] for member in sorted(claims)}
    owners = _owners(claims)
    for where in partitions:
        member = owners.get(where)
        if member is not None and where.topic in claims[member].topics:
            given[member].append(where)
    taken = set(owners)
    for where in partitions:
        if where not in taken and (readers := _readers(claims, where)):
            given[min(readers, key=lambda name: (len(given[name]), name))].append(where)
    _even_out(claims, given)
    return given


def _owners(claims: Mapping[str, Claim]) -> dict[TopicPartition, str]:
    """Who has a partition; of two who think so, the one of the later generation is right."""
    owners: dict[TopicPartition, str] = {}
    for member in sorted(claims):
        for where in claims[member].owned:
            rival = owners.get(where)
            if rival is None or claims[rival].generation_id < claims[member].generation_id:
                owners[where] = member
    return owners


def _readers(claims: Mapping[str, Claim], where: TopicPartition) -> list[str]:
    return [member for member, claim in claims.items() if where.topic in claim.topics]


def _even_out(claims: Mapping[str, Claim], given: dict[str, list[TopicPartition]]) -> None:
    """Takes partitions from who has two more than another; that one gets them in the next round."""
    loads = {member: len(partitions) for member, partitions in given.items()}
    while True:
        move = _next_move(claims, given, loads)
        if move is None:
            return
        where, source, target = move
        given[source].remove(where)
        loads[source] -= 1
        loads[target] += 1


def _next_move(
    claims: Mapping[str, Claim], given: Mapping[str, list[TopicPartition]], loads: Mapping[str, int]
) -> tuple[TopicPartition, str, str] | None:
    by_load = sorted(loads, key=lambda member: (loads[member], member))
    for source in reversed(by_load):
        for target in by_load:
            if loads[source] - loads[target] < 2:
                break
            for where in reversed(given[source]):
                if where.topic in claims[target].topics:
                    return where, source, target
    return None


def decode_claim(metadata: bytes) -> Claim:
    """Reads what a member told the leader."""
    view = memoryview(metadata)
    version = min(_format_version(view), ConsumerProtocolSubscription.MAX_VERSION)
    decoded, _ = ConsumerProtocolSubscription.decode(view, PREFIX_BYTES, version)
    owned = frozenset(
        TopicPartition(topic.topic, index) for topic in decoded.owned_partitions for index in topic.partitions
    )
    return Claim(frozenset(decoded.topics), owned, decoded.generation_id)


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    assignment = ConsumerProtocolAssignment(
        assigned_partitions=[AssignedTopic(name, indexes) for name, indexes in by_topic(partitions).items()]
    )
    out = bytearray(ASSIGNMENT_VERSION.to_bytes(PREFIX_BYTES))
    assignment.encode(out, ASSIGNMENT_VERSION, _no_splices())
    return bytes(out)


def decode_assignment(assignment: bytes) -> frozenset[TopicPartition]:
    if not assignment:
        return frozenset()
    view = memoryview(assignment)
    version = min(_format_version(view), ConsumerProtocolAssignment.MAX_VERSION)
    decoded, _ = ConsumerProtocolAssignment.decode(view, PREFIX_BYTES, version)
    return frozenset(
        TopicPartition(topic.topic, index)
        for topic in decoded.assigned_partitions
        for index in topic.partitions
    )


def _format_version(view: memoryview) -> int:
    if len(view) < PREFIX_BYTES:
        raise ProtocolError(f"a member's metadata or assignment has {len(view)} bytes: it is cut off")
    return int.from_bytes(view[:PREFIX_BYTES])


def _no_splices() -> Splices:
    return []
