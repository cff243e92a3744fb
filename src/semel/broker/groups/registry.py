"""All groups of the broker, their deadlines, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Iterator

from semel.broker.deadlines import Deadlines
from semel.broker.decision import Decision, Now, Waiter
from semel.broker.entries import GroupEntry
from semel.broker.group_messages import (
    GroupDeleted,
    GroupPart,
    GroupSettled,
    OffsetsCommitted,
    OffsetsRemoved,
    TxnOffsetsEnded,
    TxnOffsetsPending,
)
from semel.broker.groups.classic import ClassicMembership, Member, PendingMember, State
from semel.broker.groups.expiry import GROUPS_PER_LOOK, expired
from semel.broker.groups.group import Group
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
        "joins",
        "parked",
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
                group.membership.settle(entry.roster)

    def drop(self, group_id: str) -> None:
        """Forget a group that nobody is in."""
        group = self.by_id.pop(group_id, None)
        if group is not None:
            self.joins.cancel(group.membership)
            self.syncs.cancel(group.membership)
            for pending in group.membership.pending.values():
                self.sessions.cancel(pending)
            group.membership.transition(State.DEAD)

    def drop_if_void(self, membership: ClassicMembership) -> None:
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
        if now_ms >= self._look_at_ms:
            self._look_at_ms = now_ms + self.settings.retention_check_interval_ms
            self._to_look_at = list(self.by_id)
        yield from self._expire_offsets(now, catalog)

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
            for member in group.membership.members.values():
                if member not in self.sessions:
                    self.sessions.set(member, now.monotonic_ms + member.session_timeout_ms)
