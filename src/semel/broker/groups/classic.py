"""The members of a group under the classic protocol, as one rebalance leaves them and the next one finds
them.

    Empty                 nobody is in the group; it may still have offsets
    PreparingRebalance    members are asked to join again; those who do not in time are left out
    CompletingRebalance   everybody knows the new generation and waits for the leader's assignment
    Stable                everybody has an assignment
    Dead                  the group has been removed

What is journaled is the *roster*: generation, protocol and members with their assignments, as a finished
rebalance leaves them (`Stable`, or `Empty`). Everything on the way there is volatile. After a restart a group
is where its last roster says, with sessions that begin anew, and members that were on the way join again.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from semel.broker.decision import Waiter
from semel.broker.group_messages import Roster, RosterMember, RosterProtocol
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from semel.wire.primitives import DecodeError

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
_SUBSCRIPTION_VERSION_BYTES: Final = 2

Protocols: TypeAlias = list[tuple[str, bytes]]
"""Names and metadata, in the member's order of preference."""


class State(Enum):
    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


ALLOWED_FROM: Final[dict[State, frozenset[State]]] = {
    State.EMPTY: frozenset({State.PREPARING_REBALANCE}),
    State.PREPARING_REBALANCE: frozenset({State.EMPTY, State.COMPLETING_REBALANCE, State.STABLE}),
    State.COMPLETING_REBALANCE: frozenset({State.PREPARING_REBALANCE}),
    State.STABLE: frozenset({State.COMPLETING_REBALANCE}),
    State.DEAD: frozenset(State),
}


class Member:
    """A consumer in the group, or a worker of whatever else the group's protocol type stands for."""

    __slots__ = (
        "api_version",
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_joining",
        "is_new",
        "joining",
        "member_id",
        "membership",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
        "syncing",
    )

    def __init__(
        self,
        membership: ClassicMembership,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        client_host: str,
    ) -> None:
        self.membership = membership
        self.member_id = member_id
        self.instance_id = instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.session_timeout_ms = 0
        self.rebalance_timeout_ms = 0
        self.protocols: Protocols = []
        self.assignment = b""
        self.api_version = 0
        """Of its last JoinGroup: the answer depends on it."""
        self.is_new = False
        """It has not been answered with a generation yet."""
        self.is_joining = False
        """It is in the rebalance that is being prepared, even if its connection has been lost meanwhile."""
        self.joining: Waiter | None = None
        self.syncing: Waiter | None = None

    def metadata_for(self, protocol: str | None) -> bytes:
        for name, metadata in self.protocols:
            if name == protocol:
                return metadata
        return b""

    def metadata_bytes(self) -> int:
        return sum(len(metadata) for _, metadata in self.protocols)

    def vote(self, candidates: set[str]) -> str:
        """The first of its protocols that everybody has."""
        for name, _ in self.protocols:
            if name in candidates:
                return name
        raise AssertionError(f"member '{self.member_id}' has none of the protocols {sorted(candidates)}")


class PendingMember:
    """An id that was given to a client, which shall join with it (KIP-394)."""

    __slots__ = ("member_id", "membership")

    def __init__(self, membership: ClassicMembership, member_id: str) -> None:
        self.membership = membership
        self.member_id = member_id


class ClassicMembership:
    """Who is in the group, and where its rebalance stands."""

    __slots__ = (
        "_protocol_counts",
        "finished",
        "generation",
        "group_id",
        "initial_remaining_ms",
        "is_initial",
        "joining_count",
        "leader",
        "members",
        "metadata_bytes",
        "new_member_added",
        "pending",
        "protocol_name",
        "protocol_type",
        "roster",
        "state",
        "static_ids",
        "unsynced",
    )

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.roster: Roster | None = None
        """The last one journaled."""
        self.finished: Roster | None = None
        """The same, or what members had when they came from the consumer protocol, not journaled yet."""
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        self.static_ids: dict[str, str] = {}
        """From group.instance.id to the id of the member that has it now."""
        self.pending: dict[str, PendingMember] = {}
        self.joining_count = 0
        self.unsynced: set[Member] = set()
        """Members of this generation that have not asked for their assignment yet."""
        self.is_initial = False
        """The first rebalance after Empty, which waits for more members to come."""
        self.initial_remaining_ms = 0
        self.new_member_added = False
        self.metadata_bytes = 0
        self._protocol_counts: dict[str, int] = {}

    # What it is.

    @property
    def group_type(self) -> str:
        return "classic"

    @property
    def state_name(self) -> str:
        return self.state.value

    @property
    def is_empty(self) -> bool:
        return self.state is State.EMPTY

    @property
    def is_idle(self) -> bool:
        """Nobody is in the group or about to be."""
        return self.state is State.EMPTY and not self.pending

    @property
    def settled_at_ms(self) -> int | None:
        """When the last rebalance finished, which for an empty group is when the last member left."""
        return None if self.roster is None else self.roster.settled_at_ms

    @property
    def has_all_joined(self) -> bool:
        """Also those who have just been given an id are waited for, but not if nobody else is left."""
        return self.joining_count == len(self.members) and not (self.members and self.pending)

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def supports(self, protocol_type: str, protocols: Protocols) -> bool:
        """Whether a member with these protocols can work with those who are here."""
        if self.state is State.EMPTY:
            return bool(protocol_type) and bool(protocols)
        if protocol_type != self.protocol_type:
            return False
        everybody = len(self.members)
        return any(self._protocol_counts.get(name, 0) == everybody for name, _ in protocols)

    def select_protocol(self) -> str:
        """By vote among the protocols that all members have; the first to reach the most votes wins."""
        everybody = len(self.members)
        candidates = {name for name, count in self._protocol_counts.items() if count == everybody}
        votes: dict[str, int] = {}
        for member in self.members.values():
            name = member.vote(candidates)
            votes[name] = votes.get(name, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def refuses_member(self, member_id: str, instance_id: str | None) -> ErrorCode | None:
        """Why a request with this identity does not come from a member, or None if it does."""
        if instance_id is not None:
            current = self.static_ids.get(instance_id)
            if current is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if current != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return None if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def refuses_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        transactional: bool,
        api_version: int = 0,
    ) -> ErrorCode | None:
        """Why offsets of this member and generation are not taken, or None if they are.

        Without a generation the offsets come from a tool or from a consumer that assigns partitions to
        itself, and then nobody else may be in the group; transactions of old carried no generation, and are
        trusted (KIP-447).
        """
        if generation < 0 and self.state is State.EMPTY:
            return None
        if generation >= 0 or member_id or instance_id is not None:
            refused = self.refuses_member(member_id, instance_id)
            if refused is not None:
                return refused
            if generation != self.generation:
                return ErrorCode.ILLEGAL_GENERATION
        elif not transactional:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if not transactional and self.state is State.COMPLETING_REBALANCE:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return None

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether a member reads this topic; also if that cannot be told, since the metadata is the clients'
        own.
        """
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE or not self.members:
            return False
        if self.protocol_name is None:
            return True
        for member in self.members.values():
            subscription = subscription_of(member.metadata_for(self.protocol_name))
            if subscription is None or topic in subscription.topics:
                return True
        return False

    # Changing it: volatile, but for `settle`.

    def transition(self, state: State) -> None:
        assert self.state in ALLOWED_FROM[state], f"{self.group_id}: {self.state.value} to {state.value}"
        self.state = state

    def add(self, member: Member) -> None:
        if not self.members:
            self.leader = None
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static_ids[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id
        self._count(member, 1)

    def remove(self, member: Member) -> None:
        del self.members[member.member_id]
        if member.instance_id is not None:
            self.static_ids.pop(member.instance_id, None)
        self._count(member, -1)
        self.unsynced.discard(member)
        if member.is_joining:
            member.is_joining = False
            self.joining_count -= 1
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def rename(self, member: Member, member_id: str) -> None:
        """A static member has come back under a new id (KIP-345); its place and assignment are the same."""
        assert member.instance_id is not None
        if self.leader == member.member_id:
            self.leader = member_id
        del self.members[member.member_id]
        member.member_id = member_id
        self.members[member_id] = member
        self.static_ids[member.instance_id] = member_id

    def update_protocols(self, member: Member, protocols: Protocols) -> None:
        self._count(member, -1)
        member.protocols = protocols
        self._count(member, 1)

    def _count(self, member: Member, sign: int) -> None:
        counts = self._protocol_counts
        for name in {name for name, _ in member.protocols}:
            counts[name] = counts.get(name, 0) + sign
            if not counts[name]:
                del counts[name]
        self.metadata_bytes += sign * member.metadata_bytes()

    def set_joining(self, member: Member, *, is_joining: bool) -> None:
        if member.is_joining != is_joining:
            member.is_joining = is_joining
            self.joining_count += 1 if is_joining else -1

    def elect_joined_leader(self) -> bool:
        """Keep the leader if it has joined, or take another who has. False if nobody has."""
        leader = self.members.get(self.leader or "")
        if leader is not None and leader.is_joining:
            return True
        for member in self.members.values():
            if member.is_joining:
                self.leader = member.member_id
                return True
        return False

    # The roster.

    def current_roster(self, now_ms: int) -> Roster:
        return Roster(
            generation=self.generation,
            protocol_type=self.protocol_type or "",
            protocol_name=self.protocol_name,
            leader=self.leader,
            settled_at_ms=now_ms,
            members=[
                RosterMember(
                    member_id=member.member_id,
                    instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    session_timeout_ms=member.session_timeout_ms,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                    protocols=[
                        RosterProtocol(name=name, metadata=metadata) for name, metadata in member.protocols
                    ],
                    assignment=member.assignment,
                )
                for member in self.members.values()
            ],
        )

    def settle(self, roster: Roster) -> None:
        """A rebalance has finished. Members that are known keep what is volatile about them."""
        self.roster = self.finished = roster
        self.state = State.STABLE if roster.members else State.EMPTY
        self.generation = roster.generation
        self.protocol_type = roster.protocol_type or None
        self.protocol_name = roster.protocol_name
        listed = {stored.member_id for stored in roster.members}
        for member in [member for member in self.members.values() if member.member_id not in listed]:
            self.remove(member)
        for stored in roster.members:
            self._settle_member(stored)
        self.leader = roster.leader

    def _settle_member(self, stored: RosterMember) -> None:
        member = self.members.get(stored.member_id)
        if member is None:
            member = Member(self, stored.member_id, stored.instance_id, stored.client_id, stored.client_host)
            self.add(member)
        protocols = [(protocol.name, protocol.metadata) for protocol in stored.protocols]
        if protocols != member.protocols:
            self.update_protocols(member, protocols)
        member.session_timeout_ms = stored.session_timeout_ms
        member.rebalance_timeout_ms = stored.rebalance_timeout_ms
        member.assignment = stored.assignment


def subscription_of(metadata: bytes) -> ConsumerProtocolSubscription | None:
    """What a consumer subscribes to, from its metadata, or None if that is not what consumers send."""
    if len(metadata) < _SUBSCRIPTION_VERSION_BYTES:
        return None
    version = int.from_bytes(metadata[:_SUBSCRIPTION_VERSION_BYTES], signed=True)
    if version < ConsumerProtocolSubscription.MIN_VERSION:
        return None
    known = min(version, ConsumerProtocolSubscription.MAX_VERSION)
    try:
        subscription, _ = ConsumerProtocolSubscription.decode(
            memoryview(metadata), _SUBSCRIPTION_VERSION_BYTES, known
        )
    except DecodeError:
        return None
    return subscription
