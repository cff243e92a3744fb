"""The classic protocol: joining, syncing, staying and leaving."""

from __future__ import annotations

from group_cases import GROUP, REBALANCE_MS, SESSION_MS, Bench, Client, settle

from semel.broker.groups.settings import (
    MAX_MEMBER_METADATA_BYTES,
    NEW_MEMBER_JOIN_TIMEOUT_MS,
    GroupSettings,
)
from semel.wire.errors import ErrorCode


def test_a_lonely_member_leads_and_gets_what_it_assigns_itself() -> None:
    bench = Bench()
    client = Client(bench, "a")
    response = client.join().reply
    assert (response.error_code, response.generation_id) == (0, 1)
    assert response.leader == response.member_id == client.member_id
    assert [member.member_id for member in response.members] == [client.member_id]
    assert response.members[0].metadata == client.protocols[0][1]
    assert (response.protocol_type, response.protocol_name) == ("consumer", "range")
    assert bench.state == "CompletingRebalance"
    synced = client.synced({client.member_id: b"everything"})
    assert (synced.error_code, synced.assignment) == (0, b"everything")
    assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")
    assert bench.state == "Stable"
    assert client.beat() == 0


def test_a_new_client_must_come_back_with_the_id_it_was_given() -> None:
    bench = Bench()
    client = Client(bench, "a")
    first = client.send_join().reply
    assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
    assert first.member_id.startswith("a-")
    assert not bench.group.membership.members
    client.member_id = first.member_id
    assert client.send_join().reply.error_code == 0


def test_before_version_4_a_client_is_a_member_at_once() -> None:
    bench = Bench()
    response = Client(bench, version=3).send_join().reply
    assert (response.error_code, response.generation_id) == (0, 1)


def test_an_id_that_nobody_comes_back_with_is_forgotten_and_so_is_the_group() -> None:
    bench = Bench()
    Client(bench).send_join()
    bench.advance(SESSION_MS)
    assert GROUP not in bench.broker.groups.by_id


def test_an_unknown_id_is_refused() -> None:
    bench = Bench()
    client = Client(bench)
    client.member_id = "made-up"
    assert client.send_join().reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert GROUP not in bench.broker.groups.by_id
    settle(Client(bench))
    assert client.send_join().reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_second_member_starts_a_rebalance_that_waits_for_the_first() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    waiting = second.join()
    assert not waiting.is_answered
    assert bench.state == "PreparingRebalance"
    assert first.beat() == ErrorCode.REBALANCE_IN_PROGRESS
    assert first.synced().error_code == ErrorCode.REBALANCE_IN_PROGRESS
    first.join()
    second.read_join()
    assert first.generation == second.generation == 2
    assert first.leads
    assert not second.leads
    assert {member.member_id for member in first.asked.reply.members} == {first.member_id, second.member_id}
    assert second.asked.reply.members == []
    follower = second.sync()
    assert not follower.is_answered
    assert first.synced({first.member_id: b"1", second.member_id: b"2"}).assignment == b"1"
    assert follower.reply.assignment == b"2"


def test_a_member_that_the_leader_forgot_gets_an_empty_assignment() -> None:
    bench = Bench()
    client = Client(bench)
    client.join()
    assert client.synced({}).assignment == b""
    assert bench.state == "Stable"


def test_a_member_that_does_not_rejoin_in_time_is_left_out() -> None:
    bench = Bench()
    first, second = Client(bench, "a", rebalance_ms=5_000), Client(bench, "b", rebalance_ms=5_000)
    settle(first)
    second.join()
    for _ in range(10):
        bench.advance(450)
        assert first.beat() == ErrorCode.REBALANCE_IN_PROGRESS
    assert not second.asked.is_answered
    bench.advance(500)
    response = second.read_join()
    assert response is not None
    assert [member.member_id for member in response.members] == [second.member_id]
    assert response.generation_id == 2
    assert first.beat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_version_0_has_one_timeout_for_session_and_rebalance() -> None:
    bench = Bench()
    first, second = Client(bench, "a", version=0), Client(bench, "b", version=0)
    first.join()
    first.synced()
    second.join()
    bench.advance(SESSION_MS - 50)
    first.beat()
    assert not second.asked.is_answered
    bench.advance(50)
    assert second.read_join() is not None


def test_a_silent_member_is_removed_after_its_session_timeout() -> None:
    bench = Bench()
    client = Client(bench)
    settle(client)
    bench.advance(SESSION_MS - 50)
    assert bench.state == "Stable"
    assert client.beat() == 0
    bench.advance(SESSION_MS - 50)
    assert bench.state == "Stable"
    bench.advance(50)
    assert bench.state == "Empty"
    assert client.beat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_waits_for_others_is_not_silent() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    first.send_join()
    for _ in range(5):
        bench.advance(SESSION_MS - 50)
        second.beat()
    assert set(bench.group.membership.members) == {first.member_id, second.member_id}
    second.join()
    assert first.read_join().error_code == 0


def test_a_new_member_does_not_wait_for_ever() -> None:
    bench = Bench()
    first = Client(bench, "a", rebalance_ms=2 * NEW_MEMBER_JOIN_TIMEOUT_MS, session_ms=1_000_000)
    second = Client(bench, "b", version=3, rebalance_ms=2 * NEW_MEMBER_JOIN_TIMEOUT_MS)
    settle(first)
    second.send_join()
    bench.advance(NEW_MEMBER_JOIN_TIMEOUT_MS, step_ms=1_000)
    response = second.asked.reply
    assert (response.error_code, response.member_id) == (ErrorCode.UNKNOWN_MEMBER_ID, "")
    assert set(bench.group.membership.members) == {first.member_id}


def test_a_member_that_leaves_makes_the_others_rebalance() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    left = second.leave()
    assert (left.error_code, left.members[0].error_code) == (0, 0)
    assert bench.state == "PreparingRebalance"
    first.join()
    assert first.generation == 3
    assert first.leads


def test_when_the_last_member_leaves_the_group_is_empty_and_its_generation_stays() -> None:
    bench = Bench()
    client = Client(bench)
    settle(client)
    client.leave()
    assert bench.state == "Empty"
    assert bench.group.membership.generation == 2
    assert bench.group.membership.roster.protocol_name is None
    again = Client(bench)
    again.join()
    assert again.generation == 3


def test_a_member_that_left_while_joining_is_told_so() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    waiting = second.join()
    second.leave()
    assert waiting.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_leaving_without_being_a_member_is_an_error_and_changes_nothing() -> None:
    bench = Bench()
    stranger = Client(bench)
    stranger.member_id = "stranger"
    assert stranger.leave().members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    client = Client(bench)
    settle(client)
    assert stranger.leave().members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.state == "Stable"
    assert client.beat() == 0


def test_a_client_may_give_back_an_id_that_it_never_used() -> None:
    bench = Bench()
    settle(Client(bench, "a"))
    client = Client(bench, "b")
    client.member_id = client.send_join().reply.member_id
    assert client.leave().members[0].error_code == 0
    assert bench.state == "Stable"
    assert client.send_join().reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_an_old_generation_is_refused() -> None:
    bench = Bench()
    client = Client(bench)
    settle(client)
    client.generation -= 1
    assert client.beat() == ErrorCode.ILLEGAL_GENERATION
    assert client.synced().error_code == ErrorCode.ILLEGAL_GENERATION


def test_the_protocol_with_the_most_votes_wins_among_those_that_all_have() -> None:
    bench = Bench()
    first = Client(bench, "a", protocols=[("range", b"r"), ("sticky", b"s"), ("own", b"o")])
    second = Client(bench, "b", protocols=[("sticky", b"s"), ("range", b"r")])
    third = Client(bench, "c", protocols=[("sticky", b"s"), ("range", b"r")])
    first.join()
    assert first.asked.reply.protocol_name == "range"
    second.join()
    third.join()
    first.join()
    assert first.asked.reply.protocol_name == "sticky"
    assert {member.metadata for member in first.asked.reply.members} == {b"s"}


def test_a_member_without_a_protocol_in_common_is_refused() -> None:
    bench = Bench()
    settle(Client(bench, "a"))
    other = Client(bench, "b", protocols=[("other", b"")])
    assert other.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    connect = Client(bench, "c")
    connect.protocol_type = "connect"
    assert connect.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert bench.state == "Stable"


def test_the_first_member_must_name_a_protocol() -> None:
    bench = Bench()
    client = Client(bench)
    client.protocols = []
    assert client.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    client = Client(bench)
    client.protocol_type = ""
    assert client.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert GROUP not in bench.broker.groups.by_id


def test_a_follower_that_asks_again_unchanged_gets_the_same_generation() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    follower, leader = (second, first) if first.leads else (first, second)
    response = follower.send_join().reply
    assert (response.error_code, response.generation_id, response.members) == (0, 2, [])
    assert bench.state == "Stable"
    assert follower.synced().assignment == follower.name.encode()
    leader.send_join()
    assert bench.state == "PreparingRebalance"


def test_a_member_that_missed_the_answer_gets_it_again_while_others_sync() -> None:
    bench = Bench()
    client = Client(bench)
    client.join()
    again = client.send_join().reply
    assert (again.error_code, again.generation_id) == (0, 1)
    assert len(again.members) == 1
    assert bench.state == "CompletingRebalance"


def test_changed_metadata_starts_a_rebalance_and_stops_a_sync() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    follower = second if first.leads else first
    first.join()
    second.join()
    first.read_join()
    waiting = follower.sync()
    follower.protocols = [("range", b"other")]
    follower.send_join()
    assert waiting.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert bench.state == "PreparingRebalance"


def test_a_member_that_never_syncs_is_left_out() -> None:
    bench = Bench()
    first, second = Client(bench, "a", rebalance_ms=6_000), Client(bench, "b", rebalance_ms=6_000)
    first.join()
    second.join()
    first.join()
    second.read_join()
    first.synced({first.member_id: b"all"})
    for _ in range(2):
        bench.advance(2_950)
        assert first.beat() == second.beat() == 0
    bench.advance(100)
    assert bench.state == "PreparingRebalance"
    assert second.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    assert first.beat() == ErrorCode.REBALANCE_IN_PROGRESS


def test_members_that_have_synced_stay() -> None:
    bench = Bench()
    first, second = Client(bench, "a", rebalance_ms=6_000), Client(bench, "b", rebalance_ms=6_000)
    settle(first, second)
    late = Client(bench, "c", rebalance_ms=6_000)
    late.join()
    first.join()
    second.join()
    for client in (first, late):
        client.read_join()
    leader = next(client for client in (first, second, late) if client.leads)
    leader.synced({})
    for client in (first, second, late):
        if client is not leader:
            assert client.synced().error_code == 0
    for _ in range(4):
        bench.advance(5_000)
        assert first.beat() == second.beat() == late.beat() == 0
    assert bench.state == "Stable"


def test_a_sync_with_another_protocol_is_refused() -> None:
    bench = Bench()
    client = Client(bench)
    client.join()
    client.protocol_type = "connect"
    assert client.synced().error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    client.protocol_type = "consumer"
    client.protocols = [("other", b"")]
    assert client.synced().error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_a_session_timeout_out_of_bounds_is_refused() -> None:
    bench = Bench()
    for session_ms in (5_999, 1_800_001):
        response = Client(bench, session_ms=session_ms).send_join().reply
        assert response.error_code == ErrorCode.INVALID_SESSION_TIMEOUT
    assert Client(bench, session_ms=6_000).send_join().reply.error_code == ErrorCode.MEMBER_ID_REQUIRED


def test_a_group_needs_a_name() -> None:
    bench = Bench()
    client = Client(bench, group_id="")
    assert client.send_join().reply.error_code == ErrorCode.INVALID_GROUP_ID
    assert client.beat() == ErrorCode.INVALID_GROUP_ID
    assert client.synced().error_code == ErrorCode.INVALID_GROUP_ID
    assert client.leave().error_code == ErrorCode.INVALID_GROUP_ID


def test_a_full_group_takes_nobody_else() -> None:
    bench = Bench(GroupSettings(max_size=2))
    settle(Client(bench, "a"), Client(bench, "b"))
    response = Client(bench, "c").send_join().reply
    assert (response.error_code, response.member_id) == (ErrorCode.GROUP_MAX_SIZE_REACHED, "")
    assert bench.state == "Stable"


def test_the_first_rebalance_waits_for_more_members_and_longer_when_they_come() -> None:
    bench = Bench(GroupSettings(initial_rebalance_delay_ms=3_000))
    clients = [Client(bench, name) for name in "abc"]
    clients[0].join()
    bench.advance(2_000)
    clients[1].join()
    bench.advance(2_000)
    clients[2].join()
    assert not any(client.asked.is_answered for client in clients)
    bench.advance(4_950)
    assert not any(client.asked.is_answered for client in clients)
    bench.advance(100)
    for client in clients:
        client.read_join()
    assert [client.generation for client in clients] == [1, 1, 1]


def test_what_put_off_one_first_rebalance_does_not_put_off_the_next() -> None:
    bench = Bench(GroupSettings(initial_rebalance_delay_ms=3_000))
    first, second = Client(bench, "a"), Client(bench, "b")
    first.join()
    bench.advance(1_000)
    second.join()
    bench.advance(2_500)
    first.leave()
    second.leave()
    assert bench.state == "Empty"
    again = Client(bench, "c")
    again.join()
    bench.advance(3_050)
    assert again.asked.is_answered


def test_the_first_rebalance_is_not_put_off_beyond_the_rebalance_timeout() -> None:
    bench = Bench(GroupSettings(initial_rebalance_delay_ms=3_000))
    first = Client(bench, "first", rebalance_ms=7_000)
    first.join()
    for number in range(6):
        bench.advance(1_000)
        Client(bench, f"{number}", rebalance_ms=7_000).join()
    assert not first.asked.is_answered
    bench.advance(1_000)
    assert first.asked.is_answered


def test_members_and_generation_survive_a_restart() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    bench.restart()
    assert bench.state == "Stable"
    assert first.beat() == second.beat() == 0
    assert second.synced().assignment == b"b"
    assert bench.group.membership.leader == (first if first.leads else second).member_id


def test_after_a_restart_every_member_has_a_whole_session_to_come_back() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    bench.advance(SESSION_MS - 100)
    bench.restart()
    bench.advance(SESSION_MS - 100)
    assert first.beat() == 0
    bench.advance(100)
    assert bench.state == "PreparingRebalance"
    assert set(bench.group.membership.members) == {first.member_id}


def test_a_restart_in_the_middle_of_a_rebalance_goes_back_to_the_last_finished_one() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    second.join()
    first.join()
    second.read_join()
    assert bench.state == "CompletingRebalance"
    bench.restart()
    assert bench.state == "Stable"
    assert bench.group.membership.generation == 1
    assert first.beat() == ErrorCode.ILLEGAL_GENERATION
    assert second.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    second.member_id = ""
    second.join()
    first.join()
    assert first.generation == 2


def test_a_request_that_lost_its_connection_is_forgotten_but_its_member_is_not() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    waiting = second.join()
    assert waiting in bench.broker.groups.parked
    bench.broker.groups.forget_waiter(waiting)
    assert not bench.broker.groups.parked
    first.join()
    assert len(first.asked.reply.members) == 2
    assert not waiting.is_answered
    again = second.send_join().reply
    assert (again.error_code, again.generation_id) == (0, 2)


def test_a_member_that_asks_twice_is_answered_twice() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    early = second.join()
    late = second.send_join()
    assert early.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    first.join()
    assert late.reply.error_code == 0
    assert not bench.broker.groups.parked


def test_nothing_is_parked_or_timed_when_everybody_has_gone() -> None:
    bench = Bench()
    clients = [Client(bench, name) for name in "abc"]
    settle(*clients)
    for client in clients:
        client.leave()
    bench.advance(REBALANCE_MS)
    groups = bench.broker.groups
    assert bench.state == "Empty"
    assert (len(groups.parked), len(groups.sessions), len(groups.joins), len(groups.syncs)) == (0, 0, 0, 0)


def test_the_leader_learns_the_metadata_that_a_member_joined_with_last() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    follower, leader = (second, first) if first.leads else (first, second)
    follower.protocols = [("range", b"new")]
    follower.send_join()
    leader.join()
    metadata = {member.member_id: member.metadata for member in leader.asked.reply.members}
    assert metadata[follower.member_id] == b"new"


def test_a_session_begins_anew_with_the_answer_to_a_request_that_waited() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    leader, follower = (first, second) if first.leads else (second, first)
    leader.send_join()
    for _ in range(4):
        bench.advance(SESSION_MS - 50)
        follower.beat()
    follower.join()
    leader.read_join()
    bench.advance(SESSION_MS - 50)
    assert leader.beat() == follower.beat() == 0
    waiting = follower.sync()
    for _ in range(4):
        bench.advance(SESSION_MS - 50)
        assert leader.beat() == 0
    leader.synced({})
    assert waiting.is_answered
    bench.advance(SESSION_MS - 50)
    assert leader.beat() == follower.beat() == 0
    bench.advance(SESSION_MS)
    assert bench.state == "Empty", "and it ends as any other"


def test_a_sync_that_ends_in_another_rebalance_leaves_time_to_join_it() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    leader, follower = (first, second) if first.leads else (second, first)
    leader.join()
    follower.join()
    leader.read_join()
    waiting = follower.sync()
    for _ in range(3):
        bench.advance(SESSION_MS - 50)
        leader.beat()
    leader.protocols = [("range", b"new")]
    leader.send_join()
    assert waiting.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    bench.advance(SESSION_MS - 50)
    assert follower.beat() == ErrorCode.REBALANCE_IN_PROGRESS
    bench.advance(SESSION_MS)
    assert set(bench.group.membership.members) == {leader.member_id}, "but not for ever"


def test_a_member_removed_while_it_waits_for_the_leader_is_told_so() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    leader, follower = (first, second) if first.leads else (second, first)
    leader.join()
    follower.join()
    leader.read_join()
    waiting = follower.sync()
    follower.leave()
    assert waiting.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert len(bench.broker.groups.sessions) == 1


def test_a_rebalance_does_not_wait_for_ever_for_an_id_that_is_not_used() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    Client(bench, "pending").send_join()
    second.join()
    first.join()
    assert not first.asked.is_answered, "somebody has an id and may come any moment"
    bench.advance(SESSION_MS)
    assert first.read_join().error_code == second.read_join().error_code == 0


def test_a_member_that_asks_twice_for_its_assignment_is_answered_twice() -> None:
    bench = Bench()
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first, second)
    leader, follower = (first, second) if first.leads else (second, first)
    leader.join()
    follower.join()
    leader.read_join()
    early, late = follower.sync(), follower.sync()
    assert early.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    leader.synced({follower.member_id: b"share"})
    assert late.reply.assignment == b"share"


def test_too_much_metadata_is_refused() -> None:
    bench = Bench()
    client = Client(bench, protocols=[("range", bytes(MAX_MEMBER_METADATA_BYTES + 1))])
    assert client.send_join().reply.error_code == ErrorCode.INVALID_REQUEST
    client.protocols = [("range", bytes(MAX_MEMBER_METADATA_BYTES))]
    assert client.join().reply.error_code == 0
    big = [Client(bench, f"{number}", protocols=client.protocols) for number in range(8)]
    answers = [one.join() for one in big]
    refused = [one.reply.error_code for one in answers if one.is_answered]
    assert refused == [ErrorCode.GROUP_MAX_SIZE_REACHED]
