"""The members of a group under the consumer protocol (KIP-848), where the broker assigns.

There is no barrier. The group has an *epoch*, raised by whatever changes what members should read: someone
comes, goes or subscribes to something else, a topic grows. For each epoch the broker computes a *target* for
every member, and each member moves there on its own, with its heartbeats:

    STABLE      it has what its target says (of the epoch that it is at)
    REVOKING    it must give up partitions first, and stays at its old epoch until it says that it has
    WAITING     it is at the target's epoch, but others have not given up yet what it shall get

A partition belongs to a member from when it is assigned until the member has given it up, so it never has
two. All of this is journaled; sessions are not.

Members of the classic protocol can be in such a group, while an application moves from one protocol to the
other. Their epoch is told to them as the generation, and a member that must catch up is told that there is a
rebalance.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from semel.broker.group_messages import (
    ClassicSide,
    ConsumerRoster,
    ConsumerRosterMember,
    RosterProtocol,
    Target,
    TopicPartitions,
)
from semel.broker.groups.assignors import DEFAULT_ASSIGNOR, Partitions, TopicPartition
from semel.broker.groups.classic import CONSUMER_PROTOCOL_TYPE, Protocols
from semel.broker.groups.topic_pattern import TopicPattern
from semel.broker.topics import Catalog
from semel.wire.errors import ErrorCode

LEFT: Final = -1
"""The epoch that a member says when it leaves."""
LEFT_FOR_NOW: Final = -2
"""A static member has gone and will be back: its place is kept until its session ends."""
NOTHING: Final[Partitions] = frozenset()
_EPOCHS_IN_COMMITS_FROM: Final = 9


class MemberState(IntEnum):
    STABLE = 0
    REVOKING = 1
    WAITING = 2


class ClassicProtocols:
    """What a member of the classic protocol joined with."""

    __slots__ = ("protocols", "session_timeout_ms")

    def __init__(self, session_timeout_ms: int, protocols: Protocols) -> None:
        self.session_timeout_ms = session_timeout_ms
        self.protocols = protocols


class ConsumerMember:
    """A member as it is after one step; the next step makes another one of it."""

    __slots__ = (
        "assigned",
        "classic",
        "client_host",
        "client_id",
        "epoch",
        "instance_id",
        "member_id",
        "pattern",
        "previous_epoch",
        "rack_id",
        "rebalance_timeout_ms",
        "revoking",
        "server_assignor",
        "state",
        "topic_names",
    )

    def __init__(self, member_id: str, instance_id: str | None) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.rack_id: str | None = None
        self.client_id = ""
        self.client_host = ""
        self.rebalance_timeout_ms = 0
        self.topic_names: list[str] = []
        self.pattern: TopicPattern | None = None
        self.server_assignor: str | None = None
        self.epoch = 0
        self.previous_epoch = 0
        self.state = MemberState.STABLE
        self.assigned = NOTHING
        self.revoking = NOTHING
        """Taken from it, but not given up yet."""
        self.classic: ClassicProtocols | None = None
        """Set if it speaks the classic protocol."""

    def copy(self, member_id: str | None = None) -> ConsumerMember:
        twin = ConsumerMember(self.member_id if member_id is None else member_id, self.instance_id)
        twin.rack_id = self.rack_id
        twin.client_id = self.client_id
        twin.client_host = self.client_host
        twin.rebalance_timeout_ms = self.rebalance_timeout_ms
        twin.topic_names = self.topic_names
        twin.pattern = self.pattern
        twin.server_assignor = self.server_assignor
        twin.epoch = self.epoch
        twin.previous_epoch = self.previous_epoch
        twin.state = self.state
        twin.assigned = self.assigned
        twin.revoking = self.revoking
        twin.classic = self.classic
        return twin

    @property
    def topic_regex(self) -> str | None:
        return None if self.pattern is None else self.pattern.text

    def subscribes_like(self, other: ConsumerMember) -> bool:
        """Whether an assignor would treat both the same."""
        return (
            self.topic_names == other.topic_names
            and self.topic_regex == other.topic_regex
            and self.server_assignor == other.server_assignor
        )

    def is_same(self, other: ConsumerMember) -> bool:
        return self.stored() == other.stored()

    def reads(self, topic: str) -> bool:
        return topic in self.topic_names or (self.pattern is not None and self.pattern.matches(topic))

    def stored(self) -> ConsumerRosterMember:
        return ConsumerRosterMember(
            member_id=self.member_id,
            instance_id=self.instance_id,
            rack_id=self.rack_id,
            client_id=self.client_id,
            client_host=self.client_host,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            topic_names=self.topic_names,
            topic_regex=self.topic_regex,
            server_assignor=self.server_assignor,
            epoch=self.epoch,
            previous_epoch=self.previous_epoch,
            state=self.state,
            assigned=by_topic(self.assigned),
            revoking=by_topic(self.revoking),
            classic=None if self.classic is None else _stored_classic(self.classic),
        )


def _stored_classic(classic: ClassicProtocols) -> ClassicSide:
    return ClassicSide(
        session_timeout_ms=classic.session_timeout_ms,
        protocols=[RosterProtocol(name=name, metadata=metadata) for name, metadata in classic.protocols],
    )


def _loaded(stored: ConsumerRosterMember) -> ConsumerMember:
    member = ConsumerMember(stored.member_id, stored.instance_id)
    member.rack_id = stored.rack_id
    member.client_id = stored.client_id
    member.client_host = stored.client_host
    member.rebalance_timeout_ms = stored.rebalance_timeout_ms
    member.topic_names = stored.topic_names
    member.pattern = None if stored.topic_regex is None else TopicPattern(stored.topic_regex)
    member.server_assignor = stored.server_assignor
    member.epoch = stored.epoch
    member.previous_epoch = stored.previous_epoch
    member.state = MemberState(stored.state)
    member.assigned = as_partitions(stored.assigned)
    member.revoking = as_partitions(stored.revoking)
    if stored.classic is not None:
        member.classic = ClassicProtocols(
            stored.classic.session_timeout_ms,
            [(protocol.name, protocol.metadata) for protocol in stored.classic.protocols],
        )
    return member


def by_topic(partitions: Partitions) -> list[TopicPartitions]:
    found: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partitions):
        found.setdefault(topic_id, []).append(index)
    return [TopicPartitions(topic_id=topic_id, indexes=indexes) for topic_id, indexes in found.items()]


def as_partitions(topics: Iterable[TopicPartitions]) -> Partitions:
    return frozenset((topic.topic_id, index) for topic in topics for index in topic.indexes)


class ConsumerMembership:
    """Who is in the group, what each member has and what it shall have; changed by entries only."""

    __slots__ = (
        "catalog_seen",
        "changed_at_ms",
        "epoch",
        "group_id",
        "members",
        "owners",
        "static_ids",
        "target_epoch",
        "targets",
    )

    def __init__(self, group_id: str, epoch: int = 0) -> None:
        self.group_id = group_id
        self.epoch = epoch
        self.target_epoch = epoch
        """The epoch that the targets were computed for."""
        self.changed_at_ms = 0
        self.members: dict[str, ConsumerMember] = {}
        self.targets: dict[str, Partitions] = {}
        self.static_ids: dict[str, str] = {}
        self.owners: dict[TopicPartition, str] = {}
        """Who has a partition, or has not given it up yet."""
        self.catalog_seen = -1
        """The version of the catalog that the targets are known to cover. Volatile."""

    # What it is.

    @property
    def protocol_type(self) -> str | None:
        return CONSUMER_PROTOCOL_TYPE

    @property
    def group_type(self) -> str:
        return "consumer"

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def is_idle(self) -> bool:
        return not self.members

    @property
    def settled_at_ms(self) -> int | None:
        return self.changed_at_ms

    @property
    def state_name(self) -> str:
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return "Assigning"
        if any(self.is_behind(member) for member in self.members.values()):
            return "Reconciling"
        return "Stable"

    def is_behind(self, member: ConsumerMember) -> bool:
        return member.state is not MemberState.STABLE or member.epoch != self.target_epoch

    @property
    def is_all_classic(self) -> bool:
        """Everybody speaks the classic protocol, so the group has no reason to be another one."""
        return bool(self.members) and all(member.classic is not None for member in self.members.values())

    def is_subscribed_to(self, topic: str) -> bool:
        return any(member.reads(topic) for member in self.members.values())

    def target_of(self, member_id: str) -> Partitions:
        return self.targets.get(member_id, NOTHING)

    def held_by_others(self, member_id: str) -> Partitions:
        """What the member shall get and others have not given up yet."""
        return frozenset(
            partition
            for partition in self.target_of(member_id)
            if self.owners.get(partition, member_id) != member_id
        )

    def must_rejoin(self, member: ConsumerMember) -> bool:
        """Whether a member of the classic protocol would get something else if it joined again."""
        if member.epoch < self.epoch or member.state is MemberState.REVOKING:
            return True
        return member.state is MemberState.WAITING and not self.held_by_others(member.member_id)

    def refuses_member(self, member_id: str, instance_id: str | None) -> ErrorCode | None:
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
        epoch: int,
        instance_id: str | None,
        *,
        transactional: bool,
        api_version: int = _EPOCHS_IN_COMMITS_FROM,
    ) -> ErrorCode | None:
        """Why offsets of this member and epoch are not taken, or None if they are."""
        if epoch < 0 and (not self.members or (transactional and not member_id)):
            return None
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if member.classic is None and api_version < _EPOCHS_IN_COMMITS_FROM:
            return ErrorCode.UNSUPPORTED_VERSION
        if member.epoch == epoch:
            return None
        is_generation = transactional or member.classic is not None
        return ErrorCode.ILLEGAL_GENERATION if is_generation else ErrorCode.STALE_MEMBER_EPOCH

    def refuses_fetch(self, member_id: str | None, epoch: int) -> ErrorCode | None:
        """Why this member may not read offsets, or None: who claims to be a member must be a current one."""
        if member_id is None and epoch < 0:
            return None
        member = self.members.get(member_id or "")
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if member.epoch == epoch:
            return None
        return ErrorCode.STALE_MEMBER_EPOCH if member.classic is None else ErrorCode.ILLEGAL_GENERATION

    # Changes.

    def change(self, change: ConsumerRoster) -> None:
        self.epoch = change.epoch
        self.target_epoch = change.target_epoch
        self.changed_at_ms = change.changed_at_ms
        for member_id in change.removed:
            self._remove(member_id)
            self.targets.pop(member_id, None)
        for stored in change.members:
            self._remove(stored.member_id)
        for stored in change.members:
            self._add(_loaded(stored))
        for target in change.targets:
            self.targets[target.member_id] = as_partitions(target.partitions)

    def _add(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static_ids[member.instance_id] = member.member_id
        for partition in member.assigned | member.revoking:
            self.owners[partition] = member.member_id

    def _remove(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return
        if member.instance_id is not None and self.static_ids.get(member.instance_id) == member_id:
            del self.static_ids[member.instance_id]
        for partition in member.assigned | member.revoking:
            if self.owners.get(partition) == member_id:
                del self.owners[partition]

    def whole(self) -> ConsumerRoster:
        """All of it as one change, for a snapshot."""
        return ConsumerRoster(
            epoch=self.epoch,
            target_epoch=self.target_epoch,
            changed_at_ms=self.changed_at_ms,
            members=[member.stored() for member in self.members.values()],
            removed=[],
            targets=[
                Target(member_id=member_id, partitions=by_topic(partitions))
                for member_id, partitions in self.targets.items()
            ],
        )


def preferred_assignor(members: Iterable[ConsumerMember]) -> str:
    """The one that most members ask for, among those who ask."""
    votes: dict[str, int] = {}
    for member in members:
        if member.server_assignor is not None:
            votes[member.server_assignor] = votes.get(member.server_assignor, 0) + 1
    return max(sorted(votes), key=lambda name: votes[name]) if votes else DEFAULT_ASSIGNOR


def subscribed_topic_ids(member: ConsumerMember, catalog: Catalog) -> frozenset[bytes]:
    """The topics that it reads and that exist."""
    found = {
        topic.topic_id for name in member.topic_names if (topic := catalog.by_name.get(name)) is not None
    }
    if member.pattern is not None:
        found.update(topic.topic_id for topic in catalog if member.pattern.matches(topic.name))
    return frozenset(found)


def reconciled(
    member: ConsumerMember,
    target: Partitions,
    target_epoch: int,
    owned: Partitions | None,
    held_by_others: Partitions,
) -> ConsumerMember:
    """The member after one step towards its target.

    `owned` is what the member says it has, or None if it says nothing: then it has everything still.
    """
    if member.state is MemberState.REVOKING:
        if owned is None or owned & member.revoking:
            return member
    elif member.state is MemberState.STABLE and member.epoch == target_epoch:
        return member
    following = member.copy()
    kept = member.assigned & target
    taken_away = member.assigned - target
    if taken_away and (owned is None or owned & taken_away):
        following.state = MemberState.REVOKING
        following.assigned = kept
        following.revoking = taken_away
        return following
    following.state = MemberState.WAITING if held_by_others else MemberState.STABLE
    following.assigned = kept | (target - held_by_others)
    following.revoking = NOTHING
    if member.epoch != target_epoch:
        following.previous_epoch = member.epoch
        following.epoch = target_epoch
    return following
