"""ConsumerGroupHeartbeat (68): join, stay, give up and take over partitions, leave (KIP-848).

A member joins with epoch 0 and leaves with epoch -1, or -2 if it is static and will be back. In between it
says what has changed about it, and what it has when it has given something up. The answer holds its epoch,
and its assignment when that has changed or the member asks for everything.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.groups.assignors import ASSIGNORS, Partitions
from semel.broker.groups.classic import ClassicMembership
from semel.broker.groups.consumer import (
    LEFT,
    LEFT_FOR_NOW,
    NOTHING,
    ConsumerMember,
    ConsumerMembership,
    MemberState,
    by_topic,
)
from semel.broker.groups.consumer_departures import depart
from semel.broker.groups.consumer_step import ConsumerStep
from semel.broker.groups.group import Group
from semel.broker.groups.migration import leave_classic, upgraded
from semel.broker.groups.settings import MAX_GROUPS
from semel.broker.groups.topic_pattern import InvalidPattern, TopicPattern
from semel.broker.refusal import Refused
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

_OWN_MEMBER_ID_FROM: Final = 1
_UNCHANGED: Final = -1
_JOINS: Final = 0


def consumer_group_heartbeat(
    broker: Broker, request: ConsumerGroupHeartbeatRequest, caller: Caller, now: Now
) -> Decision:
    try:
        _check(request, caller.api_version)
        group = broker.groups.by_id.get(request.group_id)
        if request.member_epoch < _JOINS:
            return _leave(broker, group, request, now)
        return _Heartbeat(broker, group, request, caller, now).decide()
    except Refused as refused:
        return Decision(ConsumerGroupHeartbeatResponse(error_code=refused.code, error_message=refused.reason))


def _check(request: ConsumerGroupHeartbeatRequest, api_version: int) -> None:
    """Refuse what no member would say."""
    reason = None
    if not request.group_id:
        reason = "the group id is empty"
    elif request.instance_id == "":
        reason = "the instance id is empty"
    elif request.rack_id == "":
        reason = "the rack id is empty"
    elif not request.member_id and (api_version >= _OWN_MEMBER_ID_FROM or request.member_epoch != _JOINS):
        reason = "the member id is empty"
    elif request.member_epoch < LEFT_FOR_NOW:
        reason = f"{request.member_epoch} is no member epoch"
    elif request.member_epoch == LEFT_FOR_NOW and request.instance_id is None:
        reason = "only static members leave for a while, and this one has no instance id"
    elif request.member_epoch == _JOINS:
        reason = _why_not_join(request)
    if reason is not None:
        raise Refused(ErrorCode.INVALID_REQUEST, reason)
    if request.server_assignor is not None and request.server_assignor not in ASSIGNORS:
        raise Refused(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"there is no assignor '{request.server_assignor}', only {', '.join(ASSIGNORS)}",
        )


def _why_not_join(request: ConsumerGroupHeartbeatRequest) -> str | None:
    if request.rebalance_timeout_ms == _UNCHANGED:
        return "the first heartbeat must have a rebalance timeout"
    if request.topic_partitions is None or request.topic_partitions:
        return "a member that joins has no partitions, and must say so"
    if not request.subscribed_topic_names and not request.subscribed_topic_regex:
        return "the first heartbeat must say which topics the member reads"
    return None


class _Heartbeat:
    """One heartbeat of a member that is in the group, or joins it."""

    def __init__(
        self,
        broker: Broker,
        group: Group | None,
        request: ConsumerGroupHeartbeatRequest,
        caller: Caller,
        now: Now,
    ) -> None:
        self._broker = broker
        self._request = request
        self._caller = caller
        self._now = now
        self._joins = request.member_epoch == _JOINS
        self._left: ClassicMembership | None = None
        """The classic group that this heartbeat turns into a consumer group."""
        self._membership = self._find(group)

    def _find(self, group: Group | None) -> ConsumerMembership:
        group_id = self._request.group_id
        if group is not None and isinstance(group.membership, ConsumerMembership):
            return group.membership
        if not self._joins:
            raise Refused(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no consumer group '{group_id}'")
        if group is None:
            if len(self._broker.groups.by_id) >= MAX_GROUPS:
                raise Refused(ErrorCode.GROUP_MAX_SIZE_REACHED, f"there are {MAX_GROUPS} groups already")
            self._left = ClassicMembership(group_id)
        else:
            assert isinstance(group.membership, ClassicMembership)
            self._left = group.membership
        membership = upgraded(self._left, self._broker.catalog)
        if membership is None:
            raise Refused(
                ErrorCode.GROUP_ID_NOT_FOUND, f"the members of group '{group_id}' are not consumers"
            )
        return membership

    def decide(self) -> Decision:
        groups, membership, request = self._broker.groups, self._membership, self._request
        if self._says_nothing():
            same = membership.members[request.member_id]
            groups.expect_heartbeat(membership.group_id, same, self._now)
            return Decision(self._answer(same, same))
        step = ConsumerStep(membership, self._broker.catalog, replaces=self._left is not None)
        known = self._known(step)
        member = self._updated(known)
        owned = None if request.topic_partitions is None else _as_partitions(request.topic_partitions)
        moved = step.move(member, owned)
        entries: list[Entry] = step.entries(self._now.wall_ms)
        decision = Decision(self._answer(known, moved), entries)
        if self._left is not None:
            leave_classic(groups, self._left, decision, self._now)
        groups.expect_heartbeat(membership.group_id, moved, self._now)
        return decision

    def _says_nothing(self) -> bool:
        """The usual heartbeat: nothing is new, neither about the member nor about the group."""
        request, membership = self._request, self._membership
        known = membership.members.get(request.member_id)
        return (
            known is not None
            and request.member_epoch == known.epoch == membership.epoch
            and not membership.is_behind(known)
            and membership.catalog_seen == self._broker.catalog.version
            and request.instance_id in (None, known.instance_id)
            and request.topic_partitions is None
            and request.subscribed_topic_names is None
            and request.subscribed_topic_regex is None
            and request.server_assignor is None
            and request.rack_id is None
            and request.rebalance_timeout_ms == _UNCHANGED
        )

    def _known(self, step: ConsumerStep) -> ConsumerMember | None:
        """The member that speaks, if the group knows it and what it says fits; None if it is new."""
        request, membership = self._request, self._membership
        if request.instance_id is not None:
            known = self._known_static(step)
        else:
            known = membership.members.get(request.member_id)
        if known is None:
            if not self._joins:
                raise Refused(
                    ErrorCode.UNKNOWN_MEMBER_ID,
                    f"'{request.member_id}' is not a member of group '{request.group_id}'; join again",
                )
            if len(membership.members) >= self._broker.groups.settings.max_size:
                raise Refused(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    f"group '{request.group_id}' has {len(membership.members)} members (group.max.size)",
                )
        elif not self._joins:
            _check_epoch(known, request)
        return known

    def _known_static(self, step: ConsumerStep) -> ConsumerMember | None:
        request, membership = self._request, self._membership
        current = membership.static_ids.get(request.instance_id or "")
        known = None if current is None else membership.members[current]
        if known is None or known.member_id == request.member_id:
            return known
        if not self._joins:
            raise Refused(
                ErrorCode.FENCED_INSTANCE_ID,
                f"instance '{request.instance_id}' is now member '{known.member_id}'; stop this one",
            )
        if known.epoch != LEFT_FOR_NOW:
            raise Refused(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"instance '{request.instance_id}' is in use by member '{known.member_id}'",
            )
        self._broker.groups.consumer_sessions.cancel((membership.group_id, known.member_id))
        return step.rename(known, request.member_id)

    def _updated(self, known: ConsumerMember | None) -> ConsumerMember:
        """The member with what it says about itself now."""
        request, caller = self._request, self._caller
        if known is None:
            member_id = request.member_id or str(UUID(bytes=self._broker.new_id()))
            member = ConsumerMember(member_id, request.instance_id)
        else:
            member = known.copy()
        member.client_id, member.client_host = caller.client_id, caller.host
        member.classic = None
        if request.rack_id is not None:
            member.rack_id = request.rack_id
        if request.rebalance_timeout_ms != _UNCHANGED:
            member.rebalance_timeout_ms = request.rebalance_timeout_ms
        if request.server_assignor is not None:
            member.server_assignor = request.server_assignor
        if request.subscribed_topic_names is not None:
            member.topic_names = sorted(set(request.subscribed_topic_names))
        regex = request.subscribed_topic_regex
        if regex is not None and regex != member.topic_regex:
            member.pattern = _pattern(regex)
        return member

    def _answer(self, known: ConsumerMember | None, moved: ConsumerMember) -> ConsumerGroupHeartbeatResponse:
        request = self._request
        asks_for_all = self._joins or (
            request.rebalance_timeout_ms != _UNCHANGED
            and (request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None)
            and request.topic_partitions is not None
        )
        assignment = None
        if asks_for_all or known is None or known.assigned != moved.assigned:
            assignment = Assignment(
                topic_partitions=[
                    TopicPartitions(topic_id=topic.topic_id, partitions=topic.indexes)
                    for topic in by_topic(moved.assigned)
                ]
            )
        return ConsumerGroupHeartbeatResponse(
            error_code=0,
            member_id=moved.member_id,
            member_epoch=moved.epoch,
            heartbeat_interval_ms=self._broker.groups.settings.consumer_heartbeat_interval_ms,
            assignment=assignment,
        )


def _check_epoch(member: ConsumerMember, request: ConsumerGroupHeartbeatRequest) -> None:
    """A member may be one epoch behind if it missed an answer, and has nothing that it should not have."""
    if request.member_epoch == member.epoch:
        return
    owned = None if request.topic_partitions is None else _as_partitions(request.topic_partitions)
    missed_an_answer = request.member_epoch == member.previous_epoch and member.epoch > request.member_epoch
    if not missed_an_answer or owned is None or not owned <= member.assigned:
        raise Refused(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"member '{member.member_id}' is at epoch {member.epoch}, not {request.member_epoch}; "
            "give up all partitions and join again",
        )


def _pattern(text: str) -> TopicPattern | None:
    try:
        return TopicPattern(text) if text else None
    except InvalidPattern as invalid:
        raise Refused(
            ErrorCode.INVALID_REGULAR_EXPRESSION, f"the pattern '{text}' is not understood: {invalid}"
        ) from None


def _as_partitions(topics: list[TopicPartitions]) -> Partitions:
    return frozenset((topic.topic_id, index) for topic in topics for index in topic.partitions)


def _leave(broker: Broker, group: Group | None, request: ConsumerGroupHeartbeatRequest, now: Now) -> Decision:
    membership = None if group is None else group.membership
    if group is None or not isinstance(membership, ConsumerMembership):
        raise Refused(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no consumer group '{request.group_id}'")
    error = membership.refuses_member(request.member_id, request.instance_id)
    if error is not None:
        raise Refused(error, f"'{request.member_id}' is not a member of group '{request.group_id}'")
    member = membership.members[request.member_id]
    reply = ConsumerGroupHeartbeatResponse(
        error_code=0, member_id=member.member_id, member_epoch=request.member_epoch
    )
    if request.member_epoch == LEFT:
        decision = depart(broker.groups, group, [member.member_id], broker.catalog, now)
        decision.reply = reply
        return decision
    step = ConsumerStep(membership, broker.catalog)
    resting = member.copy()
    resting.epoch = LEFT_FOR_NOW
    resting.state = MemberState.STABLE
    resting.revoking = NOTHING
    step.members[member.member_id] = resting
    return Decision(reply, step.entries(now.wall_ms))
