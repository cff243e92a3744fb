"""ConsumerGroupDescribe (69): state and members of groups of the consumer protocol."""

from __future__ import annotations

from semel.broker.authorized_operations import NOT_ASKED, ON_GROUP
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.groups.assignors import Partitions
from semel.broker.groups.consumer import (
    ConsumerMember,
    ConsumerMembership,
    by_topic,
    preferred_assignor,
)
from semel.broker.topics import Catalog
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_group_describe import (
    Assignment,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)

_CLASSIC_MEMBER = 0
_CONSUMER_MEMBER = 1


def consumer_group_describe(
    broker: Broker, request: ConsumerGroupDescribeRequest, caller: Caller, now: Now
) -> Decision:
    groups = [_described(broker, group_id) for group_id in request.group_ids]
    if request.include_authorized_operations:
        for group in groups:
            group.authorized_operations = NOT_ASKED if group.error_code else ON_GROUP
    return Decision(ConsumerGroupDescribeResponse(groups=groups))


def _described(broker: Broker, group_id: str) -> DescribedGroup:
    if not group_id:
        return DescribedGroup(error_code=ErrorCode.INVALID_GROUP_ID, group_id=group_id)
    group = broker.groups.by_id.get(group_id)
    membership = None if group is None else group.membership
    if not isinstance(membership, ConsumerMembership):
        return DescribedGroup(
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"there is no consumer group '{group_id}'",
            group_id=group_id,
            group_state="Dead",
        )
    return DescribedGroup(
        error_code=0,
        group_id=group_id,
        group_state=membership.state_name,
        group_epoch=membership.epoch,
        assignment_epoch=membership.target_epoch,
        assignor_name=preferred_assignor(membership.members.values()),
        members=[
            _described_member(membership, member, broker.catalog) for member in membership.members.values()
        ],
    )


def _described_member(membership: ConsumerMembership, member: ConsumerMember, catalog: Catalog) -> Member:
    return Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=f"/{member.client_host}",
        subscribed_topic_names=member.topic_names,
        subscribed_topic_regex=member.topic_regex,
        assignment=_assignment(member.assigned, catalog),
        target_assignment=_assignment(membership.target_of(member.member_id), catalog),
        member_type=_CONSUMER_MEMBER if member.classic is None else _CLASSIC_MEMBER,
    )


def _assignment(partitions: Partitions, catalog: Catalog) -> Assignment:
    return Assignment(
        topic_partitions=[
            TopicPartitions(topic_id=topic.topic_id, topic_name=known.name, partitions=topic.indexes)
            for topic in by_topic(partitions)
            if (known := catalog.by_id.get(topic.topic_id)) is not None
        ]
    )
