"""Rebalances of the classic protocol: one step at a time, each of them a decision.

Joining. A member that joins, leaves or falls silent starts a rebalance: the others learn it from their
heartbeats and join again. When all have joined, or the longest of their rebalance timeouts has passed,
dynamic members who have not are left out; static ones keep their place for as long as their session lasts.
The generation is raised, the protocol is selected by vote, and everybody is answered; the leader also gets
the list of members.

Syncing. The leader's SyncGroup brings the assignment. It settles the generation in the journal, and everybody
who waits is answered with their share. Who has not asked for it within the rebalance timeout is left out, in
a new rebalance.

Sessions. A member is removed when nothing is heard of it for its session timeout. While its request to join
or to sync is parked here, nothing can be expected of it, so it is not, unless it is so new that it cannot
know its id yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from semel.broker.decision import PARKED, Caller, Decision, Now, Waiter
from semel.broker.group_messages import GroupSettled
from semel.broker.groups.classic import ClassicMembership, Member, PendingMember, Protocols, State
from semel.broker.groups.settings import NEW_MEMBER_JOIN_TIMEOUT_MS
from semel.wire.errors import ErrorCode
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from semel.wire.messages.sync_group import SyncGroupResponse

if TYPE_CHECKING:
    from semel.broker.groups.registry import Groups

NULL_PROTOCOL_NAME_FROM: Final = 7
"""JoinGroup says "no protocol" as null since this version, as an empty string before."""
SKIP_ASSIGNMENT_FROM: Final = 9


def join_refused(error: ErrorCode, member_id: str, api_version: int) -> JoinGroupResponse:
    return JoinGroupResponse(
        error_code=error,
        member_id=member_id,
        protocol_name=None if api_version >= NULL_PROTOCOL_NAME_FROM else "",
    )


def rebalance_timeout_ms(request: JoinGroupRequest, api_version: int) -> int:
    """Version 0 had one timeout for sessions and rebalances."""
    return request.rebalance_timeout_ms if api_version >= 1 else request.session_timeout_ms


class Rebalance:
    """One step of one group: who is answered, and what is journaled, gathers in `decision`."""

    __slots__ = ("decision", "groups", "membership", "now")

    def __init__(self, groups: Groups, membership: ClassicMembership, now: Now) -> None:
        self.groups = groups
        self.membership = membership
        self.now = now
        self.decision = Decision(None)

    # Members come.

    def add_pending(self, member_id: str, session_timeout_ms: int) -> None:
        pending = self.membership.pending[member_id] = PendingMember(self.membership, member_id)
        self.groups.sessions.set(pending, self.now.monotonic_ms + session_timeout_ms)

    def add(
        self, member_id: str, request: JoinGroupRequest, protocols: Protocols, caller: Caller
    ) -> Decision:
        """A new member joins."""
        membership = self.membership
        pending = membership.pending.pop(member_id, None)
        if pending is not None:
            self.groups.sessions.cancel(pending)
        if not membership.members:
            membership.protocol_type = request.protocol_type
        member = Member(membership, member_id, request.group_instance_id, caller.client_id, caller.host)
        member.is_new = True
        if membership.is_initial:
            membership.new_member_added = True
        member.protocols = protocols
        membership.add(member)
        self._park_join(member, request, caller)
        self.groups.sessions.set(member, self.now.monotonic_ms + NEW_MEMBER_JOIN_TIMEOUT_MS)
        return self._prepare_or_complete()

    def rejoin(
        self, member: Member, request: JoinGroupRequest, protocols: Protocols, caller: Caller
    ) -> Decision:
        """A known member joins again, perhaps with other metadata."""
        self.membership.update_protocols(member, protocols)
        self._park_join(member, request, caller)
        return self._prepare_or_complete()

    def replace(
        self,
        member: Member,
        member_id: str,
        request: JoinGroupRequest,
        protocols: Protocols,
        caller: Caller,
    ) -> Decision:
        """A static member is back under a new id; whoever still uses the old one is fenced.

        If the group is stable and the vote stays as it is, nobody else needs to know: the member gets its old
        place and assignment. Clients before v9 are not told that they lead, or they would assign anew; since
        v9 the leader is told to skip the assignment (KIP-814).
        """
        membership = self.membership
        old_leader = membership.leader
        self._fence(member)
        membership.rename(member, member_id)
        member.client_id, member.client_host = caller.client_id, caller.host
        membership.update_protocols(member, protocols)
        self._set_timeouts(member, request, caller)
        self.touch(member)
        if membership.state is State.STABLE and membership.select_protocol() == membership.protocol_name:
            response = self.joined(member)
            if caller.api_version >= SKIP_ASSIGNMENT_FROM:
                response.skip_assignment = membership.leader == member_id
            else:
                response.leader = old_leader or ""
                response.members = []
            self._settle()
            self.decision.reply = response
            return self.decision
        self._park_join(member, request, caller)
        return self._prepare_or_complete()

    def _park_join(self, member: Member, request: JoinGroupRequest, caller: Caller) -> None:
        if member.joining is not None:
            # The same member asks again on another connection; the first request has lost its meaning.
            self._answer_join(
                member, join_refused(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id, member.api_version)
            )
        self._set_timeouts(member, request, caller)
        member.joining = caller.waiter
        self.groups.parked[caller.waiter] = member
        self.membership.set_joining(member, is_joining=True)
        self.decision.reply = PARKED

    def _set_timeouts(self, member: Member, request: JoinGroupRequest, caller: Caller) -> None:
        member.api_version = caller.api_version
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = rebalance_timeout_ms(request, caller.api_version)

    # Members go.

    def remove(self, member: Member) -> None:
        """Take a member out, and tell it so if it waits. `continue_without` must follow."""
        if member.joining is not None:
            self._answer_join(member, join_refused(ErrorCode.UNKNOWN_MEMBER_ID, "", member.api_version))
        if member.syncing is not None:
            self._answer_sync(member, ErrorCode.UNKNOWN_MEMBER_ID)
        self.membership.remove(member)
        self.groups.sessions.cancel(member)

    def forget_pending(self, member_id: str) -> None:
        """A client does not come back with the id that it was given. `complete_if_joined` must follow."""
        pending = self.membership.pending.pop(member_id, None)
        if pending is not None:
            self.groups.sessions.cancel(pending)
            self.groups.drop_if_void(self.membership)

    def complete_if_joined(self) -> Decision:
        membership = self.membership
        if membership.state is State.PREPARING_REBALANCE and membership.has_all_joined:
            return self._complete_join()
        return self.decision

    def continue_without(self) -> Decision:
        """Members have gone: the others must share what they had."""
        membership = self.membership
        if membership.state in (State.STABLE, State.COMPLETING_REBALANCE):
            return self._prepare()
        return self.complete_if_joined()

    def _fence(self, member: Member) -> None:
        if member.joining is not None:
            self._answer_join(
                member, join_refused(ErrorCode.FENCED_INSTANCE_ID, member.member_id, member.api_version)
            )
        if member.syncing is not None:
            self._answer_sync(member, ErrorCode.FENCED_INSTANCE_ID)

    def send_away(self, member: Member) -> None:
        """Let a member that waits here join again: the group is not what it was."""
        if member.joining is not None:
            self._answer_join(
                member, join_refused(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id, member.api_version)
            )
        if member.syncing is not None:
            self._answer_sync(member, ErrorCode.REBALANCE_IN_PROGRESS)

    # Deadlines.

    def touch(self, member: Member) -> None:
        """Something was heard of the member."""
        self.groups.sessions.set(member, self.now.monotonic_ms + member.session_timeout_ms)

    def expire_session(self, member: Member | PendingMember) -> Decision:
        membership = self.membership
        if isinstance(member, PendingMember):
            self.forget_pending(member.member_id)
            return self.complete_if_joined()
        if membership.members.get(member.member_id) is not member:
            return self.decision
        if not member.is_new and (member.is_joining or member.syncing is not None):
            return self.decision  # Its session begins anew with the answer.
        self.remove(member)
        return self.continue_without()

    def expire_join(self) -> Decision:
        membership = self.membership
        assert membership.state is State.PREPARING_REBALANCE, membership.state
        if membership.is_initial and membership.new_member_added and membership.initial_remaining_ms:
            membership.new_member_added = False
            delay_ms = min(self.groups.settings.initial_rebalance_delay_ms, membership.initial_remaining_ms)
            membership.initial_remaining_ms -= delay_ms
            self.groups.joins.set(membership, self.now.monotonic_ms + delay_ms)
            return self.decision
        return self._complete_join()

    def expire_sync(self) -> Decision:
        membership = self.membership
        assert membership.state in (State.COMPLETING_REBALANCE, State.STABLE), membership.state
        for member in tuple(membership.unsynced):
            self.remove(member)
        return self._prepare()

    # Joining.

    def _prepare_or_complete(self) -> Decision:
        membership = self.membership
        if membership.state is not State.PREPARING_REBALANCE:
            return self._prepare()
        if membership.has_all_joined and not membership.is_initial:
            return self._complete_join()
        return self.decision

    def _prepare(self) -> Decision:
        membership = self.membership
        groups = self.groups
        for member in membership.members.values():
            if member.syncing is not None:
                self._answer_sync(member, ErrorCode.REBALANCE_IN_PROGRESS)
                self.touch(member)
        membership.unsynced.clear()
        groups.syncs.cancel(membership)
        delay_ms = groups.settings.initial_rebalance_delay_ms
        membership.is_initial = membership.state is State.EMPTY and delay_ms > 0
        membership.transition(State.PREPARING_REBALANCE)
        if membership.is_initial:
            membership.new_member_added = False
            membership.initial_remaining_ms = max(0, membership.rebalance_timeout_ms - delay_ms)
            groups.joins.set(membership, self.now.monotonic_ms + delay_ms)
            return self.decision
        if membership.has_all_joined:
            return self._complete_join()
        groups.joins.set(membership, self.now.monotonic_ms + membership.rebalance_timeout_ms)
        return self.decision

    def _complete_join(self) -> Decision:
        membership = self.membership
        groups = self.groups
        groups.joins.cancel(membership)
        for member in tuple(membership.members.values()):
            if not member.is_joining and member.instance_id is None:
                self.remove(member)
        if membership.members and not membership.elect_joined_leader():
            # Only static members are left, and none is back: wait for them, or for the end of their sessions.
            groups.joins.set(membership, self.now.monotonic_ms + membership.rebalance_timeout_ms)
            return self.decision
        membership.generation += 1
        if not membership.members:
            membership.protocol_name = None
            membership.transition(State.EMPTY)
            self._settle()
            return self.decision
        membership.protocol_name = membership.select_protocol()
        membership.transition(State.COMPLETING_REBALANCE)
        for member in membership.members.values():
            member.is_new = False
            self._answer_join(member, self.joined(member))
            self.touch(member)
            membership.unsynced.add(member)
        groups.syncs.set(membership, self.now.monotonic_ms + membership.rebalance_timeout_ms)
        return self.decision

    def joined(self, member: Member) -> JoinGroupResponse:
        """The generation as this member is told of it; the leader learns of the others."""
        membership = self.membership
        response = JoinGroupResponse(
            error_code=0,
            generation_id=membership.generation,
            protocol_type=membership.protocol_type,
            protocol_name=membership.protocol_name,
            leader=membership.leader or "",
            member_id=member.member_id,
        )
        if membership.leader == member.member_id:
            response.members = [
                JoinGroupResponseMember(
                    member_id=other.member_id,
                    group_instance_id=other.instance_id,
                    metadata=other.metadata_for(membership.protocol_name),
                )
                for other in membership.members.values()
            ]
        return response

    def _answer_join(self, member: Member, response: JoinGroupResponse) -> None:
        self.membership.set_joining(member, is_joining=False)
        if member.joining is not None:
            self._answer(member.joining, response)
            member.joining = None

    # Syncing.

    def park_sync(self, member: Member, waiter: Waiter) -> Decision:
        """A follower waits for the leader."""
        self._synced(member)
        if member.syncing is not None:
            self._answer_sync(member, ErrorCode.REBALANCE_IN_PROGRESS)
        member.syncing = waiter
        self.groups.parked[waiter] = member
        self.decision.reply = PARKED
        return self.decision

    def assign(self, leader: Member, assignments: dict[str, bytes]) -> Decision:
        """The leader has decided: everybody gets their share, and the generation is settled."""
        membership = self.membership
        self._synced(leader)
        membership.transition(State.STABLE)
        for member in membership.members.values():
            member.assignment = assignments.get(member.member_id, b"")
            if member.syncing is not None:
                self._answer_sync(member, ErrorCode.NONE)
                self.touch(member)
        self._settle()
        self.touch(leader)
        self.decision.reply = self.assigned(leader)
        return self.decision

    def give(self, member: Member) -> Decision:
        """The assignment is known already."""
        self._synced(member)
        self.touch(member)
        self.decision.reply = self.assigned(member)
        return self.decision

    def assigned(self, member: Member) -> SyncGroupResponse:
        return SyncGroupResponse(
            error_code=0,
            protocol_type=self.membership.protocol_type,
            protocol_name=self.membership.protocol_name,
            assignment=member.assignment,
        )

    def _synced(self, member: Member) -> None:
        membership = self.membership
        membership.unsynced.discard(member)
        if not membership.unsynced:
            self.groups.syncs.cancel(membership)

    def _answer_sync(self, member: Member, error: ErrorCode) -> None:
        if member.syncing is not None:
            response = (
                self.assigned(member) if error is ErrorCode.NONE else SyncGroupResponse(error_code=error)
            )
            self._answer(member.syncing, response)
            member.syncing = None

    # The decision.

    def _answer(self, waiter: Waiter, response: JoinGroupResponse | SyncGroupResponse) -> None:
        self.groups.parked.pop(waiter, None)
        self.decision.others.append((waiter, response))

    def _settle(self) -> None:
        membership = self.membership
        self.decision.entries.append(
            GroupSettled(group_id=membership.group_id, roster=membership.current_roster(self.now.wall_ms))
        )
