"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup of classic members in a group of the consumer protocol.

Nobody waits for anybody: a member that joins is answered at once with its own epoch as the generation, and
nobody is the leader. SyncGroup gives it what the broker has assigned. A heartbeat tells it to join again
whenever that would change anything.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.assignors import Partitions
from semel.broker.groups.classic import (
    CONSUMER_PROTOCOL_TYPE,
    ClassicMembership,
    Protocols,
    subscription_of,
)
from semel.broker.groups.consumer import ClassicProtocols, ConsumerMember, ConsumerMembership
from semel.broker.groups.consumer_departures import depart
from semel.broker.groups.consumer_step import ConsumerStep
from semel.broker.groups.group import Group
from semel.broker.groups.migration import downgraded, write_assignment
from semel.broker.groups.rebalance import Rebalance, join_refused, rebalance_timeout_ms
from semel.broker.topics import Catalog
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from semel.wire.messages.heartbeat import HeartbeatRequest
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupResponse
from semel.wire.messages.leave_group import MemberIdentity
from semel.wire.messages.sync_group import SyncGroupRequest, SyncGroupResponse

ID_REQUIRED_FROM: Final = 4


def classic_membership(broker: Broker, group: Group, now: Now) -> ClassicMembership | None:
    """The members of a group that a client wants to join by the classic protocol.

    A consumer group that is empty, or in which everybody speaks the classic protocol, is a classic group from
    now on. None if it goes on as a consumer group.
    """
    membership = group.membership
    if isinstance(membership, ClassicMembership):
        return membership
    if membership.members and not membership.is_all_classic:
        return None
    members = list(membership.members.values())
    classic = downgraded(broker.groups, membership, members, membership.epoch, broker.catalog)
    for member in classic.members.values():
        Rebalance(broker.groups, classic, now).touch(member)
    group.membership = classic
    return classic


def join(
    broker: Broker, membership: ConsumerMembership, request: JoinGroupRequest, caller: Caller, now: Now
) -> Decision:
    protocols = [(protocol.name, protocol.metadata) for protocol in request.protocols]
    subscription = subscription_of(protocols[0][1]) if protocols else None
    error = _refuses_join(broker, membership, request, protocols)
    if error is None and subscription is None:
        error = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if error is not None:
        return Decision(join_refused(error, request.member_id, caller.api_version))
    assert subscription is not None
    name = caller.client_id if request.group_instance_id is None else request.group_instance_id
    member_id = request.member_id or f"{name}-{UUID(bytes=broker.new_id())}"
    is_dynamic = request.group_instance_id is None
    if not request.member_id and is_dynamic and caller.api_version >= ID_REQUIRED_FROM:
        return Decision(join_refused(ErrorCode.MEMBER_ID_REQUIRED, member_id, caller.api_version))
    step = ConsumerStep(membership, broker.catalog)
    member = _joining(step, membership, request, member_id)
    member.client_id, member.client_host = caller.client_id, caller.host
    member.rack_id = subscription.rack_id
    member.rebalance_timeout_ms = rebalance_timeout_ms(request, caller.api_version)
    member.topic_names = sorted(set(subscription.topics))
    member.pattern = member.server_assignor = None
    member.classic = ClassicProtocols(request.session_timeout_ms, protocols)
    moved = step.move(member, _owned(subscription, broker.catalog))
    broker.groups.expect_heartbeat(membership.group_id, moved, now)
    broker.groups.has_rejoined(membership.group_id, moved)
    reply = JoinGroupResponse(
        error_code=0,
        generation_id=moved.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol_name=protocols[0][0],
        leader="",
        member_id=member_id,
    )
    return Decision(reply, step.entries(now.wall_ms))


def _refuses_join(
    broker: Broker, membership: ConsumerMembership, request: JoinGroupRequest, protocols: Protocols
) -> ErrorCode | None:
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not protocols:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    names = {name for name, _ in protocols}
    for other in membership.members.values():
        if other.classic is not None and other.member_id != request.member_id:
            # They must still understand each other when the last member of the consumer protocol has gone.
            names &= {name for name, _ in other.classic.protocols}
    if not names:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if request.group_instance_id is not None and request.member_id:
        return membership.refuses_member(request.member_id, request.group_instance_id)
    known = request.member_id in membership.members or request.group_instance_id in membership.static_ids
    if not known and len(membership.members) >= broker.groups.settings.max_size:
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    return None


def _joining(
    step: ConsumerStep, membership: ConsumerMembership, request: JoinGroupRequest, member_id: str
) -> ConsumerMember:
    instance_id = request.group_instance_id
    current = None if instance_id is None else membership.static_ids.get(instance_id)
    if current is not None and current != member_id:
        return step.rename(membership.members[current], member_id)
    known = membership.members.get(member_id)
    return ConsumerMember(member_id, instance_id) if known is None else known.copy()


def _owned(subscription: ConsumerProtocolSubscription, catalog: Catalog) -> Partitions:
    """What the member still has. Eager members have given up everything before they join."""
    return frozenset(
        (topic.topic_id, index)
        for owned in subscription.owned_partitions
        if (topic := catalog.by_name.get(owned.topic)) is not None
        for index in owned.partitions
    )


def sync(broker: Broker, membership: ConsumerMembership, request: SyncGroupRequest, now: Now) -> Decision:
    error = _refuses(membership, request.member_id, request.group_instance_id, request.generation_id)
    if error is not None:
        return Decision(SyncGroupResponse(error_code=error))
    member = membership.members[request.member_id]
    assert member.classic is not None
    name = member.classic.protocols[0][0]
    if request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE) or request.protocol_name not in (
        None,
        name,
    ):
        return Decision(SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
    broker.groups.expect_heartbeat(membership.group_id, member, now)
    return Decision(
        SyncGroupResponse(
            error_code=0,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            protocol_name=name,
            assignment=write_assignment(member, broker.catalog),
        )
    )


def beat(broker: Broker, membership: ConsumerMembership, request: HeartbeatRequest, now: Now) -> ErrorCode:
    error = _refuses(membership, request.member_id, request.group_instance_id, request.generation_id)
    if error is not None:
        return error
    member = membership.members[request.member_id]
    broker.groups.expect_heartbeat(membership.group_id, member, now)
    if membership.must_rejoin(member):
        broker.groups.expect_rejoin(membership.group_id, member, now)
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def _refuses(
    membership: ConsumerMembership, member_id: str, instance_id: str | None, generation: int
) -> ErrorCode | None:
    error = membership.refuses_member(member_id, instance_id)
    if error is not None:
        return error
    member = membership.members[member_id]
    if member.classic is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return None if member.epoch == generation else ErrorCode.ILLEGAL_GENERATION


def leave(
    broker: Broker, group: Group, leaving: list[MemberIdentity], now: Now
) -> tuple[Decision, list[ErrorCode]]:
    membership = group.membership
    assert isinstance(membership, ConsumerMembership)
    member_ids: list[str] = []
    errors: list[ErrorCode] = []
    for wanted in leaving:
        member_id = wanted.member_id
        if not member_id and wanted.group_instance_id is not None:
            member_id = membership.static_ids.get(wanted.group_instance_id, "")
        error = membership.refuses_member(member_id, wanted.group_instance_id)
        if error is None and member_id in member_ids:
            error = ErrorCode.UNKNOWN_MEMBER_ID
        if error is None:
            member_ids.append(member_id)
        errors.append(error or ErrorCode.NONE)
    if not member_ids:
        return Decision(None), errors
    return depart(broker.groups, group, member_ids, broker.catalog, now), errors
