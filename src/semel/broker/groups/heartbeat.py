"""Heartbeat (12): a member is alive, and learns whether it must join again."""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.classic import State
from semel.broker.groups.classic_members import beat
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.rebalance import Rebalance
from semel.wire.errors import ErrorCode
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse


def heartbeat(broker: Broker, request: HeartbeatRequest, caller: Caller, now: Now) -> Decision:
    return Decision(HeartbeatResponse(error_code=_beat(broker, request, now)))


def _beat(broker: Broker, request: HeartbeatRequest, now: Now) -> ErrorCode:
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    group = broker.groups.by_id.get(request.group_id)
    if group is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    membership = group.membership
    if isinstance(membership, ConsumerMembership):
        return beat(broker, membership, request, now)
    error = membership.refuses_member(request.member_id, request.group_instance_id)
    if error is not None:
        return error
    if request.generation_id != membership.generation:
        return ErrorCode.ILLEGAL_GENERATION
    Rebalance(broker.groups, membership, now).touch(membership.members[request.member_id])
    if membership.state is State.PREPARING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE
