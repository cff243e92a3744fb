"""LeaveGroup (13): a member goes, or a tool removes several.

Since v3 a request names any number of members. A tool knows static members by their group.instance.id alone
and leaves the member id empty.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.classic_members import leave
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.rebalance import Rebalance
from semel.wire.errors import ErrorCode
from semel.wire.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)

_SEVERAL_FROM: Final = 3


def leave_group(broker: Broker, request: LeaveGroupRequest, caller: Caller, now: Now) -> Decision:
    if not request.group_id:
        return Decision(LeaveGroupResponse(error_code=ErrorCode.INVALID_GROUP_ID))
    leaving = request.members
    if caller.api_version < _SEVERAL_FROM:
        leaving = [MemberIdentity(member_id=request.member_id)]
    group = broker.groups.by_id.get(request.group_id)
    decision = Decision(None)
    if group is None:
        errors = [ErrorCode.UNKNOWN_MEMBER_ID] * len(leaving)
    elif isinstance(group.membership, ConsumerMembership):
        decision, errors = leave(broker, group, leaving, now)
    else:
        step = Rebalance(broker.groups, group.membership, now)
        members_before = len(group.membership.members)
        errors = [_leave(step, member) for member in leaving]
        has_shrunk = len(group.membership.members) < members_before
        decision = step.continue_without() if has_shrunk else step.complete_if_joined()
    if caller.api_version < _SEVERAL_FROM:
        decision.reply = LeaveGroupResponse(error_code=errors[0])
        return decision
    decision.reply = LeaveGroupResponse(
        error_code=0,
        members=[
            MemberResponse(
                member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=error
            )
            for member, error in zip(leaving, errors, strict=True)
        ],
    )
    return decision


def _leave(step: Rebalance, leaving: MemberIdentity) -> ErrorCode:
    membership = step.membership
    member_id = leaving.member_id
    if not member_id and leaving.group_instance_id is not None:
        member_id = membership.static_ids.get(leaving.group_instance_id, "")
    elif member_id in membership.pending:
        step.forget_pending(member_id)
        return ErrorCode.NONE
    error = membership.refuses_member(member_id, leaving.group_instance_id)
    if error is not None:
        return error
    step.remove(membership.members[member_id])
    return ErrorCode.NONE
