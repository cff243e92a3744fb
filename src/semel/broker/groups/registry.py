"""All groups of the broker, their deadlines, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Iterator

from semel.broker.deadlines import Deadlines
from semel.broker.decision import Decision, Now, Waiter
from semel.broker.entries import GroupEntry
from semel.broker.group_messages import (
    ConsumerGroupChanged,
    GroupDeleted,
    GroupPart,
    GroupSettled,
    OffsetsCommitted,
    OffsetsRemoved,
    TxnOffsetsEnded,
    TxnOffsetsPending,
)
from semel.broker.groups.classic import ClassicMembership, Member, PendingMember, State
from semel.broker.groups.consumer import ConsumerMember, ConsumerMembership, MemberState
from semel.broker.groups.consumer_departures import expire_member
from semel.broker.groups.expiry import GROUPS_PER_LOOK, expired
from semel.broker.groups.group import Group, Membership
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.settings import GroupSettings
from semel.broker.topics import Catalog
from semel.wire.errors import ErrorCode


class Groups:
    """Groups by id. Entries change what is journaled of them; the rest is volatile."""

    __slots__ = (
        "_look_at_ms",
        "_to_look_at",
        "by_id",
        "consumer_sessions",
        "joins",
        "parked",
        "rejoins",
        "sessions",
        "settings",
        "syncs",
    )

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.by_id: dict[str, Group] = {}
        self.sessions: Deadlines[Member | PendingMember] = Deadlines()
        self.joins: Deadlines[ClassicMembership] = Deadlines()
        """When a rebalance goes on without those who have not joined."""
        self.syncs: Deadlines[ClassicMembership] = Deadlines()
        """When members who have not asked for their assignment are left out."""
        self.consumer_sessions: Deadlines[tuple[str, str]] = Deadlines()
        """Of members of consumer groups, by the ids of the group and of the member."""
        self.rejoins: Deadlines[tuple[str, str, int]] = Deadlines()
        """When such a member must have moved on from an epoch: given up partitions, or joined again."""
        self.parked: dict[Waiter, Member] = {}
        """Requests to join or sync that wait for other members."""
        self._look_at_ms: int | None = None
        """When offsets are next looked at for expiry; None before the first tick of a life."""
        self._to_look_at: list[str] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_id.values())

    def get_or_create(self, group_id: str) -> Group:
        group = self.by_id.get(group_id)
        if group is None:
            group = self.by_id[group_id] = Group(group_id)
        return group

    # The journal.

    def apply(self, entry: GroupEntry) -> None:
        if isinstance(entry, GroupDeleted):
            self.drop(entry.group_id)
            return
        group = self.get_or_create(entry.group_id)
        match entry:
            case OffsetsCommitted():
                group.offsets.commit(entry)
            case TxnOffsetsPending():
                group.offsets.hold(entry)
            case TxnOffsetsEnded():
                group.offsets.end(entry)
                self.drop_if_void(group.membership)
            case OffsetsRemoved():
                group.offsets.remove(entry)
            case GroupSettled():
                group.settle(entry)
            case ConsumerGroupChanged():
                group.change(entry)

    def drop(self, group_id: str) -> None:
        """Forget a group that nobody is in."""
        group = self.by_id.pop(group_id, None)
        membership = None if group is None else group.membership
        if isinstance(membership, ClassicMembership):
            self.joins.cancel(membership)
            self.syncs.cancel(membership)
            for pending in membership.pending.values():
                self.sessions.cancel(pending)
            membership.transition(State.DEAD)

    def drop_if_void(self, membership: Membership) -> None:
        """Forget a group that has nothing left: an id given away in vain, offsets that were aborted."""
        group = self.by_id.get(membership.group_id)
        if group is not None and group.membership is membership and group.is_idle and not group.is_journaled:
            self.drop(group.group_id)

    def load(self, part: GroupPart) -> None:
        self.get_or_create(part.group_id).load(part)

    # What others ask.

    def refuses_txn_commit(
        self, group_id: str, member_id: str, generation: int, instance_id: str | None
    ) -> ErrorCode | None:
        """Why a transaction may not commit offsets for this group under this identity (KIP-447), or None."""
        group = self.by_id.get(group_id)
        if group is None:
            return ErrorCode.ILLEGAL_GENERATION if generation >= 0 else None
        return group.membership.refuses_commit(member_id, generation, instance_id, transactional=True)

    def forget_waiter(self, waiter: Waiter) -> None:
        """Its connection is gone. The member stays: it may come back and ask again."""
        member = self.parked.pop(waiter, None)
        if member is not None:
            if member.joining is waiter:
                member.joining = None
            if member.syncing is waiter:
                member.syncing = None

    # Members of consumer groups.

    def expect_heartbeat(self, group_id: str, member: ConsumerMember, now: Now) -> None:
        """Something was heard of the member; what it must give up it must give up in time."""
        timeout_ms = (
            self.settings.consumer_session_timeout_ms
            if member.classic is None
            else member.classic.session_timeout_ms
        )
        self.consumer_sessions.set((group_id, member.member_id), now.monotonic_ms + timeout_ms)
        if member.state is MemberState.REVOKING:
            self.expect_rejoin(group_id, member, now)
        else:
            self.rejoins.cancel((group_id, member.member_id, member.previous_epoch))

    def expect_rejoin(self, group_id: str, member: ConsumerMember, now: Now) -> None:
        key = (group_id, member.member_id, member.epoch)
        if key not in self.rejoins:
            self.rejoins.set(key, now.monotonic_ms + member.rebalance_timeout_ms)

    def has_rejoined(self, group_id: str, member: ConsumerMember) -> None:
        if member.state is not MemberState.REVOKING:
            self.rejoins.cancel((group_id, member.member_id, member.epoch))

    # Time.

    def tick(self, now: Now, catalog: Catalog) -> Iterator[Decision]:
        """What has come due. Each decision must be applied before the next one is taken."""
        now_ms = now.monotonic_ms
        if self._look_at_ms is None:
            self._look_at_ms = now_ms + self.settings.retention_check_interval_ms
            self._start_sessions(now)
        for member in self.sessions.due(now_ms):
            if member not in self.sessions:
                yield Rebalance(self, member.membership, now).expire_session(member)
        for membership in self.joins.due(now_ms):
            if membership not in self.joins:
                yield Rebalance(self, membership, now).expire_join()
        for membership in self.syncs.due(now_ms):
            if membership not in self.syncs:
                yield Rebalance(self, membership, now).expire_sync()
        yield from self._expire_consumers(now, catalog)
        if now_ms >= self._look_at_ms:
            self._look_at_ms = now_ms + self.settings.retention_check_interval_ms
            self._to_look_at = list(self.by_id)
        yield from self._expire_offsets(now, catalog)

    def _expire_consumers(self, now: Now, catalog: Catalog) -> Iterator[Decision]:
        for key in self.consumer_sessions.due(now.monotonic_ms):
            decision = expire_member(self, key, None, catalog, now)
            if decision is not None:
                yield decision
        for group_id, member_id, epoch in self.rejoins.due(now.monotonic_ms):
            decision = expire_member(self, (group_id, member_id), epoch, catalog, now)
            if decision is not None:
                yield decision

    def _expire_offsets(self, now: Now, catalog: Catalog) -> Iterator[Decision]:
        looked_at, self._to_look_at = self._to_look_at[:GROUPS_PER_LOOK], self._to_look_at[GROUPS_PER_LOOK:]
        for group_id in looked_at:
            group = self.by_id.get(group_id)
            if group is not None:
                entry = expired(group, catalog, now.wall_ms, self.settings.offsets_retention_ms)
                if entry is not None:
                    yield Decision(None, [entry])

    def _start_sessions(self, now: Now) -> None:
        """After a restart every member has a whole session's time to come back."""
        for group in self.by_id.values():
            membership = group.membership
            if isinstance(membership, ConsumerMembership):
                for consumer in membership.members.values():
                    if (group.group_id, consumer.member_id) not in self.consumer_sessions:
                        self.expect_heartbeat(group.group_id, consumer, now)
            else:
                for member in membership.members.values():
                    if member not in self.sessions:
                        self.sessions.set(member, now.monotonic_ms + member.session_timeout_ms)
