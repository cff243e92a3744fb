"""Listing, describing and deleting groups."""

from __future__ import annotations

import pytest
from group_cases import GROUP, Bench, Client, settle

from semel.broker.groups.group_admin import delete_groups, describe_groups, list_groups
from semel.wire.errors import ErrorCode
from semel.wire.messages.delete_groups import DeleteGroupsRequest
from semel.wire.messages.describe_groups import DescribedGroup, DescribeGroupsRequest
from semel.wire.messages.list_groups import ListGroupsRequest


def listed(bench: Bench, *, states: tuple[str, ...] = (), types: tuple[str, ...] = ()) -> dict[str, str]:
    request = ListGroupsRequest(states_filter=list(states), types_filter=list(types))
    response = bench.ask(list_groups, request, 5).reply
    assert all(group.group_type == "classic" for group in response.groups)
    return {group.group_id: group.group_state for group in response.groups}


def described(bench: Bench, group_id: str, version: int = 6) -> DescribedGroup:
    group: DescribedGroup = bench.ask(
        describe_groups, DescribeGroupsRequest(groups=[group_id]), version
    ).reply.groups[0]
    return group


def test_groups_are_listed_by_state_and_type() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.commit("events", 1, group_id="simple")
    settle(Client(bench))
    assert listed(bench) == {"simple": "Empty", GROUP: "Stable"}
    assert listed(bench, states=("stable",)) == {GROUP: "Stable"}
    assert listed(bench, states=("Empty", "Stable"), types=("CLASSIC",)) == {
        "simple": "Empty",
        GROUP: "Stable",
    }
    assert listed(bench, types=("consumer",)) == {}


@pytest.mark.parametrize("version", range(7))
def test_a_stable_group_is_described_with_its_members(version: int) -> None:
    bench = Bench()
    client = Client(bench, "app", instance_id="i")
    settle(client)
    group = described(bench, GROUP, version)
    assert (group.error_code, group.group_state) == (0, "Stable")
    assert (group.protocol_type, group.protocol_data) == ("consumer", "range")
    (member,) = group.members
    assert (member.member_id, member.group_instance_id) == (client.member_id, "i")
    assert (member.client_id, member.client_host) == ("app", "/10.0.0.1")
    assert (member.member_metadata, member.member_assignment) == (client.protocols[0][1], b"app")


def test_a_group_in_a_rebalance_shows_who_is_in_it_and_what_they_had() -> None:
    bench = Bench()
    first = Client(bench, "a")
    settle(first)
    Client(bench, "b").join()
    group = described(bench, GROUP)
    assert (group.group_state, group.protocol_data) == ("PreparingRebalance", "")
    assert len(group.members) == 2
    assert {(member.member_metadata, member.member_assignment) for member in group.members} == {
        (b"", b"a"),
        (b"", b""),
    }


def test_a_group_that_does_not_exist_is_dead_and_an_error_since_version_6() -> None:
    bench = Bench()
    assert described(bench, "none", 5).error_code == 0
    assert described(bench, "none", 5).group_state == "Dead"
    group = described(bench, "none", 6)
    assert (group.error_code, group.group_state) == (ErrorCode.GROUP_ID_NOT_FOUND, "Dead")


def test_only_empty_groups_are_deleted() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.commit("events", 1, group_id="simple")
    client = Client(bench)
    settle(client)
    names = ["simple", GROUP, "none", "simple"]
    results = bench.ask(delete_groups, DeleteGroupsRequest(groups_names=names), 2).reply.results
    assert {result.group_id: result.error_code for result in results} == {
        "simple": 0,
        GROUP: ErrorCode.NON_EMPTY_GROUP,
        "none": ErrorCode.GROUP_ID_NOT_FOUND,
    }
    assert listed(bench) == {GROUP: "Stable"}
    bench.restart()
    assert listed(bench) == {GROUP: "Stable"}
    assert bench.fetch("events", group_id="simple").committed_offset == -1
