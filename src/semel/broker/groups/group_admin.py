"""ListGroups (16), DescribeGroups (15), DeleteGroups (42): what tools ask about groups."""

from __future__ import annotations

from typing import Final

from semel.broker.authorized_operations import NOT_ASKED, ON_GROUP
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.group_messages import GroupDeleted
from semel.broker.groups.classic import ClassicMembership, State
from semel.broker.groups.group import Group
from semel.wire.errors import ErrorCode
from semel.wire.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from semel.wire.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from semel.wire.messages.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse

_NOT_FOUND_FROM: Final = 6
"""Since this version a group that does not exist is an error, and not a dead group."""


def list_groups(broker: Broker, request: ListGroupsRequest, caller: Caller, now: Now) -> Decision:
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    listed = [_listed(group) for group in broker.groups]
    return Decision(
        ListGroupsResponse(
            error_code=0,
            groups=[
                group
                for group in listed
                if (not states or group.group_state.lower() in states)
                and (not types or group.group_type.lower() in types)
            ],
        )
    )


def _listed(group: Group) -> ListedGroup:
    membership = group.membership
    return ListedGroup(
        group_id=group.group_id,
        protocol_type=membership.protocol_type or "",
        group_state=membership.state_name,
        group_type=membership.group_type,
    )


def describe_groups(broker: Broker, request: DescribeGroupsRequest, caller: Caller, now: Now) -> Decision:
    groups = [
        _described(group_id, broker.groups.by_id.get(group_id), caller.api_version)
        for group_id in request.groups
    ]
    if request.include_authorized_operations:
        for group in groups:
            group.authorized_operations = NOT_ASKED if group.error_code else ON_GROUP
    return Decision(DescribeGroupsResponse(groups=groups))


def _described(group_id: str, group: Group | None, api_version: int) -> DescribedGroup:
    if group is not None and isinstance(group.membership, ClassicMembership):
        return _described_members(group.membership)
    described = DescribedGroup(error_code=0, group_id=group_id, group_state=State.DEAD.value)
    if api_version >= _NOT_FOUND_FROM:
        described.error_code = ErrorCode.GROUP_ID_NOT_FOUND
        described.error_message = f"there is no classic group '{group_id}'"
    return described


def _described_members(membership: ClassicMembership) -> DescribedGroup:
    """A group that is not stable has no protocol; its members have what the last rebalance gave them."""
    stable = membership.state is State.STABLE
    return DescribedGroup(
        error_code=0,
        group_id=membership.group_id,
        group_state=membership.state.value,
        protocol_type=membership.protocol_type or "",
        protocol_data=(membership.protocol_name or "") if stable else "",
        members=[
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=f"/{member.client_host}",
                member_metadata=member.metadata_for(membership.protocol_name) if stable else b"",
                member_assignment=member.assignment,
            )
            for member in membership.members.values()
        ],
    )


def delete_groups(broker: Broker, request: DeleteGroupsRequest, caller: Caller, now: Now) -> Decision:
    entries: list[Entry] = []
    results = []
    for group_id in dict.fromkeys(request.groups_names):
        error = _refuses_delete(broker.groups.by_id.get(group_id))
        if error is ErrorCode.NONE:
            entries.append(GroupDeleted(group_id=group_id))
        results.append(DeletableGroupResult(group_id=group_id, error_code=error))
    return Decision(DeleteGroupsResponse(results=results), entries)


def _refuses_delete(group: Group | None) -> ErrorCode:
    if group is None:
        return ErrorCode.GROUP_ID_NOT_FOUND
    if not group.membership.is_empty or group.offsets.pending:
        # An open transaction is about to move its offsets: that is a member, too.
        return ErrorCode.NON_EMPTY_GROUP
    return ErrorCode.NONE
