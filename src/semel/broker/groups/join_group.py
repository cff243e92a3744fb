"""JoinGroup (11): enter a group, or its next generation.

A client without an id is given one, and since v4 must come back with it before it counts as a member
(KIP-394): a client that gave up waiting for the answer to its first request left a ghost behind. A static
member (v5, KIP-345) is known by its group.instance.id instead. Answers wait until everybody has joined.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.classic import ClassicMembership, Member, Protocols, State
from semel.broker.groups.classic_members import ID_REQUIRED_FROM, classic_membership, join
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.rebalance import Rebalance, join_refused
from semel.broker.groups.settings import MAX_GROUP_METADATA_BYTES, MAX_GROUPS, MAX_MEMBER_METADATA_BYTES
from semel.wire.errors import ErrorCode
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupResponse

_NO_MEMBER: Final = ""


def join_group(broker: Broker, request: JoinGroupRequest, caller: Caller, now: Now) -> Decision:
    error = _refuses(broker, request)
    if error is not None:
        return Decision(join_refused(error, request.member_id, caller.api_version))
    group = broker.groups.get_or_create(request.group_id)
    membership = classic_membership(broker, group, now)
    if membership is None:
        assert isinstance(group.membership, ConsumerMembership)
        return join(broker, group.membership, request, caller, now)
    protocols = [(protocol.name, protocol.metadata) for protocol in request.protocols]
    step = Rebalance(broker.groups, membership, now)
    if not _has_room(membership, request, protocols, broker.groups.settings.max_size):
        refusal = join_refused(ErrorCode.GROUP_MAX_SIZE_REACHED, _NO_MEMBER, caller.api_version)
        return _turn_away(step, request.member_id, refusal)
    if not membership.supports(request.protocol_type, protocols):
        broker.groups.drop_if_void(membership)
        return Decision(
            join_refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, request.member_id, caller.api_version)
        )
    if request.member_id != _NO_MEMBER:
        return _join_as(step, request, protocols, caller)
    return _join_anew(broker, step, request, protocols, caller)


def _refuses(broker: Broker, request: JoinGroupRequest) -> ErrorCode | None:
    settings = broker.groups.settings
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
        return ErrorCode.INVALID_SESSION_TIMEOUT
    if sum(len(protocol.metadata) for protocol in request.protocols) > MAX_MEMBER_METADATA_BYTES:
        return ErrorCode.INVALID_REQUEST
    if request.group_id not in broker.groups.by_id:
        if request.member_id != _NO_MEMBER:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if len(broker.groups.by_id) >= MAX_GROUPS:
            return ErrorCode.GROUP_MAX_SIZE_REACHED
    return None


def _has_room(
    membership: ClassicMembership, request: JoinGroupRequest, protocols: Protocols, max_size: int
) -> bool:
    known = _known_member(membership, request)
    if known is None:
        joins_bytes = sum(len(metadata) for _, metadata in protocols)
        if membership.metadata_bytes + joins_bytes > MAX_GROUP_METADATA_BYTES:
            return False
    if membership.state is State.PREPARING_REBALANCE:
        # Those who wait count: if the limit was lowered, the last to come back are turned away.
        return (known is not None and known.is_joining) or membership.joining_count < max_size
    if request.member_id in membership.pending:
        return len(membership.members) < max_size
    return known is not None or len(membership.members) + len(membership.pending) < max_size


def _known_member(membership: ClassicMembership, request: JoinGroupRequest) -> Member | None:
    if request.member_id != _NO_MEMBER or request.group_instance_id is None:
        return membership.members.get(request.member_id)
    return membership.members.get(membership.static_ids.get(request.group_instance_id, ""))


def _turn_away(step: Rebalance, member_id: str, refusal: JoinGroupResponse) -> Decision:
    member = step.membership.members.get(member_id)
    decision = step.decision
    if member is not None:
        step.remove(member)
        decision = step.continue_without()
    decision.reply = refusal
    return decision


def _join_anew(
    broker: Broker, step: Rebalance, request: JoinGroupRequest, protocols: Protocols, caller: Caller
) -> Decision:
    membership = step.membership
    instance_id = request.group_instance_id
    name = caller.client_id if instance_id is None else instance_id
    member_id = f"{name}-{UUID(bytes=broker.new_id())}"
    if instance_id is not None:
        known = _known_member(membership, request)
        if known is not None:
            return step.replace(known, member_id, request, protocols, caller)
        return step.add(member_id, request, protocols, caller)
    if caller.api_version >= ID_REQUIRED_FROM:
        step.add_pending(member_id, request.session_timeout_ms)
        return Decision(join_refused(ErrorCode.MEMBER_ID_REQUIRED, member_id, caller.api_version))
    return step.add(member_id, request, protocols, caller)


def _join_as(step: Rebalance, request: JoinGroupRequest, protocols: Protocols, caller: Caller) -> Decision:
    """Join under an id that this broker has given."""
    membership = step.membership
    if request.member_id in membership.pending and request.group_instance_id is None:
        return step.add(request.member_id, request, protocols, caller)
    error = membership.refuses_member(request.member_id, request.group_instance_id)
    if error is not None:
        return Decision(join_refused(error, request.member_id, caller.api_version))
    member = membership.members[request.member_id]
    if _is_up_to_date(membership, member, protocols):
        # It may have missed the answer to an earlier request.
        member.api_version = caller.api_version
        return Decision(step.joined(member))
    return step.rejoin(member, request, protocols, caller)


def _is_up_to_date(membership: ClassicMembership, member: Member, protocols: Protocols) -> bool:
    """Whether joining would change nothing. A leader of a stable group joins to have it assigned anew."""
    if membership.state is State.COMPLETING_REBALANCE:
        return member.protocols == protocols
    if membership.state is State.STABLE:
        return member.protocols == protocols and membership.leader != member.member_id
    return False
