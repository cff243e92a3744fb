"""Static members (KIP-345): a place in the group that outlives the process."""

from __future__ import annotations

import pytest
from group_cases import GROUP, SESSION_MS, Bench, Client, settle

from semel.broker.groups.leave_group import leave_group
from semel.wire.errors import ErrorCode
from semel.wire.messages.leave_group import LeaveGroupRequest, MemberIdentity


def static(bench: Bench, name: str, **options: int) -> Client:
    return Client(bench, name, instance_id=name, **options)  # type: ignore[arg-type]


def test_a_static_member_needs_no_detour_for_its_id() -> None:
    bench = Bench()
    response = static(bench, "a").send_join().reply
    assert response.error_code == 0
    assert response.member_id.startswith("a-")
    assert response.members[0].group_instance_id == "a"


@pytest.mark.parametrize("version", range(5, 10))
def test_a_static_follower_that_comes_back_keeps_its_assignment_and_nobody_rebalances(version: int) -> None:
    bench = Bench()
    leader, follower = static(bench, "a"), static(bench, "b")
    settle(leader, follower)
    if follower.leads:
        leader, follower = follower, leader
    back = static(bench, follower.name, version=version)
    response = back.join().reply
    assert (response.error_code, response.generation_id) == (0, 2)
    assert response.member_id != follower.member_id
    assert response.leader == leader.member_id
    assert response.members == []
    assert bench.state == "Stable"
    assert back.synced().assignment == follower.name.encode()
    assert leader.beat() == back.beat() == 0
    assert follower.beat() == ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("version", range(5, 10))
def test_a_static_leader_that_comes_back_does_not_assign_anew(version: int) -> None:
    bench = Bench()
    leader, follower = static(bench, "a"), static(bench, "b")
    settle(leader, follower)
    if follower.leads:
        leader, follower = follower, leader
    back = static(bench, leader.name, version=version)
    response = back.join().reply
    assert response.error_code == 0
    if version >= 9:
        assert response.leader == response.member_id
        assert response.skip_assignment
        assert len(response.members) == 2
    else:
        assert response.leader == leader.member_id, "it must not think that it leads"
        assert response.members == []
    assert bench.group.membership.leader == response.member_id
    assert back.synced().assignment == leader.name.encode()


def test_the_new_id_of_a_static_member_survives_a_restart() -> None:
    bench = Bench()
    client = static(bench, "a")
    settle(client)
    back = static(bench, "a")
    back.join()
    bench.restart()
    assert back.beat() == 0
    assert client.beat() == ErrorCode.FENCED_INSTANCE_ID
    assert list(bench.group.membership.members) == [back.member_id]


def test_a_static_member_that_comes_back_with_another_vote_makes_the_group_rebalance() -> None:
    bench = Bench()
    both = [("range", b"r"), ("sticky", b"s")]
    client = Client(bench, "a", instance_id="a", protocols=both)
    settle(client)
    back = Client(bench, "a", instance_id="a", protocols=list(reversed(both)))
    response = back.join().reply
    assert (response.generation_id, response.protocol_name) == (2, "sticky")
    assert bench.state == "CompletingRebalance"


def test_a_static_member_replaced_while_it_joins_is_fenced() -> None:
    bench = Bench()
    first, second = static(bench, "a"), static(bench, "b")
    settle(first)
    waiting = second.join()
    back = static(bench, "b")
    back.join()
    assert waiting.reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    first.join()
    assert back.read_join().generation_id == 2
    assert len(first.asked.reply.members) == 2


def test_a_static_member_replaced_while_others_sync_starts_a_rebalance() -> None:
    bench = Bench()
    first, second = static(bench, "a"), static(bench, "b")
    settle(first)
    second.join()
    first.join()
    second.read_join()
    waiting = second.sync()
    static(bench, "b").join()
    assert waiting.reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    assert bench.state == "PreparingRebalance"
    assert first.beat() == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_static_member_is_kept_through_a_rebalance_until_its_session_ends() -> None:
    bench = Bench()
    away = static(bench, "away", session_ms=30_000, rebalance_ms=6_000)
    here = static(bench, "here", session_ms=30_000, rebalance_ms=6_000)
    settle(away, here)
    newcomer = static(bench, "new", session_ms=30_000, rebalance_ms=6_000)
    newcomer.join()
    here.join()
    bench.advance(6_050)
    here.read_join()
    newcomer.read_join()
    assert here.generation == newcomer.generation == 3
    assert away.member_id in bench.group.membership.members


def test_a_group_of_absent_static_members_waits_for_their_sessions_to_end() -> None:
    bench = Bench()
    first, second = static(bench, "a", rebalance_ms=6_000), static(bench, "b", rebalance_ms=6_000)
    settle(first, second)
    bench.ask(
        leave_group,
        LeaveGroupRequest(group_id=GROUP, members=[MemberIdentity(member_id="", group_instance_id="a")]),
        3,
    )
    bench.advance(7_000)
    assert bench.state == "PreparingRebalance"
    bench.advance(SESSION_MS)
    assert bench.state == "Empty"


def test_a_tool_removes_static_members_by_instance_id() -> None:
    bench = Bench()
    first, second = static(bench, "a"), static(bench, "b")
    settle(first, second)
    members = [MemberIdentity(member_id="", group_instance_id=name) for name in ("a", "b", "c")]
    members.append(MemberIdentity(member_id="x", group_instance_id="a"))
    response = bench.ask(leave_group, LeaveGroupRequest(group_id=GROUP, members=members), 4).reply
    errors = [(member.group_instance_id, member.error_code) for member in response.members]
    unknown = ErrorCode.UNKNOWN_MEMBER_ID
    assert errors == [("a", 0), ("b", 0), ("c", unknown), ("a", unknown)]
    assert bench.state == "Empty"


def test_a_fenced_static_member_can_do_nothing() -> None:
    bench = Bench()
    bench.create_topic("events")
    old = static(bench, "a")
    settle(old)
    new = static(bench, "a")
    new.join()
    fenced = ErrorCode.FENCED_INSTANCE_ID
    assert old.send_join().reply.error_code == fenced
    assert old.synced().error_code == fenced
    assert old.beat() == fenced
    assert bench.commit("events", 1, member=old) == fenced
    assert old.leave().members[0].error_code == fenced
    assert new.beat() == 0
    assert bench.commit("events", 1, member=new) == 0


def test_an_unknown_instance_with_a_member_id_is_unknown() -> None:
    bench = Bench()
    settle(static(bench, "a"))
    other = static(bench, "b")
    other.member_id = "b-1"
    assert other.send_join().reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_that_comes_back_brings_its_own_timeouts() -> None:
    bench = Bench()
    settle(static(bench, "a"))
    bench.advance(SESSION_MS - 100)
    back = static(bench, "a", session_ms=20_000)
    back.join()
    bench.advance(19_900)
    assert back.beat() == 0
    bench.advance(20_000)
    assert bench.state == "Empty"
