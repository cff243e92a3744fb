"""From one group protocol to the other, with members in the group (KIP-848).

Upwards: the first member that speaks the consumer protocol turns a classic group of consumers into a consumer
group. The others keep what they have, go on with the classic protocol, and learn from their heartbeats to
join again. Downwards: when the last such member has gone, those who are left make a classic group again,
which rebalances at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from semel.broker.decision import Decision, Now
from semel.broker.group_messages import Roster, RosterMember, RosterProtocol
from semel.broker.groups.assignors import Partitions, TopicPartition
from semel.broker.groups.classic import (
    CONSUMER_PROTOCOL_TYPE,
    ClassicMembership,
    Member,
    State,
    subscription_of,
)
from semel.broker.groups.consumer import NOTHING, ClassicProtocols, ConsumerMember, ConsumerMembership
from semel.broker.groups.rebalance import Rebalance
from semel.broker.topics import Catalog
from semel.wire.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from semel.wire.messages.consumer_protocol_assignment import TopicPartition as Assigned
from semel.wire.primitives import DecodeError

if TYPE_CHECKING:
    from semel.broker.groups.registry import Groups

_VERSION_BYTES: Final = 2


def upgraded(classic: ClassicMembership, catalog: Catalog) -> ConsumerMembership | None:
    """The same group under the consumer protocol, or None if its members are no consumers."""
    consumer = ConsumerMembership(classic.group_id, classic.generation)
    if not classic.members:
        return consumer
    if classic.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    # A rebalance under way has no assignments yet: members have what the last one gave them.
    finished = [] if classic.finished is None else classic.finished.members
    assignments = {stored.member_id: stored.assignment for stored in finished}
    for member in classic.members.values():
        assigned = read_assignment(assignments.get(member.member_id, b""), catalog)
        twin = _upgraded_member(member, classic.generation)
        if twin is None:
            return None
        twin.assigned = frozenset(partition for partition in assigned if partition not in consumer.owners)
        consumer.members[twin.member_id] = twin
        consumer.targets[twin.member_id] = twin.assigned
        for partition in twin.assigned:
            consumer.owners[partition] = twin.member_id
        if twin.instance_id is not None:
            consumer.static_ids[twin.instance_id] = twin.member_id
    return consumer


def _upgraded_member(member: Member, epoch: int) -> ConsumerMember | None:
    subscription = subscription_of(member.protocols[0][1]) if member.protocols else None
    if subscription is None:
        return None
    twin = ConsumerMember(member.member_id, member.instance_id)
    twin.rack_id = subscription.rack_id
    twin.client_id, twin.client_host = member.client_id, member.client_host
    twin.rebalance_timeout_ms = member.rebalance_timeout_ms
    twin.topic_names = sorted(set(subscription.topics))
    twin.epoch = twin.previous_epoch = epoch
    twin.classic = ClassicProtocols(member.session_timeout_ms, member.protocols)
    return twin


def leave_classic(groups: Groups, classic: ClassicMembership, decision: Decision, now: Now) -> None:
    """Those who wait in a rebalance of the classic group are sent to join again; sessions go on."""
    step = Rebalance(groups, classic, now)
    for member in classic.members.values():
        step.send_away(member)
        groups.sessions.cancel(member)
        groups.consumer_sessions.set(
            (classic.group_id, member.member_id), now.monotonic_ms + member.session_timeout_ms
        )
    for pending in classic.pending.values():
        groups.sessions.cancel(pending)
    groups.joins.cancel(classic)
    groups.syncs.cancel(classic)
    classic.state = State.DEAD
    decision.others += step.decision.others


def downgraded(
    groups: Groups, consumer: ConsumerMembership, members: list[ConsumerMember], epoch: int, catalog: Catalog
) -> ClassicMembership:
    """A classic group of members that all speak the classic protocol, as stable as they were."""
    classic = ClassicMembership(consumer.group_id)
    stored = [_downgraded_member(member, catalog) for member in members]
    classic.settle(
        Roster(generation=epoch, protocol_type=CONSUMER_PROTOCOL_TYPE, settled_at_ms=0, members=stored)
    )
    classic.roster = None  # The journal does not know it yet.
    if classic.members:
        classic.protocol_name = classic.select_protocol()
        classic.leader = next(iter(classic.members))
    else:
        classic.protocol_type = None
    for member_id in consumer.members:
        groups.consumer_sessions.cancel((consumer.group_id, member_id))
    return classic


def _downgraded_member(member: ConsumerMember, catalog: Catalog) -> RosterMember:
    classic = member.classic
    assert classic is not None
    return RosterMember(
        member_id=member.member_id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        session_timeout_ms=classic.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        protocols=[RosterProtocol(name=name, metadata=metadata) for name, metadata in classic.protocols],
        assignment=write_assignment(member, catalog),
    )


# Assignments as consumers of the classic protocol write them to each other.


def read_assignment(assignment: bytes, catalog: Catalog) -> Partitions:
    if len(assignment) < _VERSION_BYTES:
        return NOTHING
    version = int.from_bytes(assignment[:_VERSION_BYTES], signed=True)
    known = max(ConsumerProtocolAssignment.MIN_VERSION, min(version, ConsumerProtocolAssignment.MAX_VERSION))
    try:
        decoded, _ = ConsumerProtocolAssignment.decode(memoryview(assignment), _VERSION_BYTES, known)
    except DecodeError:
        return NOTHING
    partitions: set[TopicPartition] = set()
    for given in decoded.assigned_partitions:
        topic = catalog.by_name.get(given.topic)
        if topic is not None:
            partitions.update((topic.topic_id, index) for index in given.partitions)
    return frozenset(partitions)


def write_assignment(member: ConsumerMember, catalog: Catalog) -> bytes:
    """In the version in which the member wrote its subscription."""
    assert member.classic is not None
    metadata = member.classic.protocols[0][1]
    version = int.from_bytes(metadata[:_VERSION_BYTES], signed=True)
    version = max(0, min(version, ConsumerProtocolAssignment.MAX_VERSION))
    by_name: dict[str, list[int]] = {}
    for topic_id, index in sorted(member.assigned):
        topic = catalog.by_id.get(topic_id)
        if topic is not None:
            by_name.setdefault(topic.name, []).append(index)
    out = bytearray(version.to_bytes(_VERSION_BYTES))
    ConsumerProtocolAssignment(
        assigned_partitions=[Assigned(topic=name, partitions=indexes) for name, indexes in by_name.items()]
    ).encode(out, version, [])
    return bytes(out)
