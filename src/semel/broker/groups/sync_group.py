"""SyncGroup (14): the leader brings the assignment, everybody else waits for it."""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.classic import ClassicMembership, State
from semel.broker.groups.classic_members import sync
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.settings import MAX_ASSIGNMENT_BYTES
from semel.wire.errors import ErrorCode
from semel.wire.messages.sync_group import SyncGroupRequest, SyncGroupResponse

_PROTOCOL_REQUIRED_FROM: Final = 5


def sync_group(broker: Broker, request: SyncGroupRequest, caller: Caller, now: Now) -> Decision:
    error = _refuses(request, caller.api_version)
    if error is not None:
        return Decision(SyncGroupResponse(error_code=error))
    group = broker.groups.by_id.get(request.group_id)
    if group is None:
        return Decision(SyncGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID))
    membership = group.membership
    if isinstance(membership, ConsumerMembership):
        return sync(broker, membership, request, now)
    error = _refuses_member(membership, request)
    if error is not None:
        return Decision(SyncGroupResponse(error_code=error))
    member = membership.members[request.member_id]
    step = Rebalance(broker.groups, membership, now)
    if membership.state is State.STABLE:
        return step.give(member)
    if membership.leader != member.member_id:
        return step.park_sync(member, caller.waiter)
    return step.assign(member, {given.member_id: given.assignment for given in request.assignments})


def _refuses(request: SyncGroupRequest, api_version: int) -> ErrorCode | None:
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    if api_version >= _PROTOCOL_REQUIRED_FROM and (
        request.protocol_type is None or request.protocol_name is None
    ):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if sum(len(given.assignment) for given in request.assignments) > MAX_ASSIGNMENT_BYTES:
        return ErrorCode.INVALID_REQUEST
    return None


def _refuses_member(membership: ClassicMembership, request: SyncGroupRequest) -> ErrorCode | None:
    error = membership.refuses_member(request.member_id, request.group_instance_id)
    if error is not None:
        return error
    if request.generation_id != membership.generation:
        return ErrorCode.ILLEGAL_GENERATION
    if request.protocol_type not in (None, membership.protocol_type):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if request.protocol_name not in (None, membership.protocol_name):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if membership.state is State.PREPARING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return None
