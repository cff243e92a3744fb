"""The consumer protocol (KIP-848): the broker assigns, and every member moves on its own."""

from __future__ import annotations

import pytest
from consumer_cases import ConsumerClient, check_disjoint, converge, membership_of, state_of, topic_partitions
from group_cases import GROUP, Asked, Bench

from semel.broker.decision import Decision
from semel.broker.group_messages import GroupPart
from semel.broker.groups.consumer_group_describe import consumer_group_describe
from semel.broker.groups.consumer_group_heartbeat import consumer_group_heartbeat
from semel.broker.groups.group_admin import delete_groups, describe_groups, list_groups
from semel.broker.groups.offset_commit import offset_commit
from semel.broker.groups.offset_delete import offset_delete
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.groups.registry import Groups
from semel.broker.groups.settings import GroupSettings
from semel.broker.journal_messages import PartitionsAdded, TopicDeleted
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from semel.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from semel.wire.messages.delete_groups import DeleteGroupsRequest
from semel.wire.messages.describe_groups import DescribeGroupsRequest
from semel.wire.messages.list_groups import ListGroupsRequest
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from semel.wire.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from semel.wire.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup

SESSION_MS = 45_000


def counts(*clients: ConsumerClient) -> list[int]:
    return [len(client.owned) for client in clients]


# Joining, moving, leaving.


def test_a_lonely_member_gets_everything_at_once() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events", 3)
    client = ConsumerClient(bench, "a")
    assert client.join() == 0
    assert client.epoch == 1
    assert client.owned == {(topic_id, 0), (topic_id, 1), (topic_id, 2)}
    assert state_of(bench) == "Stable"


def test_the_answer_says_how_often_to_come() -> None:
    bench = Bench(GroupSettings(consumer_heartbeat_interval_ms=1234))
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    assert client.send(client.join_request()).heartbeat_interval_ms == 1234


def test_a_newcomer_gets_partitions_only_when_they_have_been_given_up() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    assert counts(first, second) == [4, 0]
    assert state_of(bench) == "Reconciling"
    assert second.epoch == 2
    answer = first.send(first.request())
    assert answer.member_epoch == 1, "it stays at its epoch until it has given up"
    first.take(answer)
    second.beat()
    assert counts(first, second) == [2, 0]
    assert first.beat() == 0, "now it says what it has left"
    assert first.epoch == 2
    second.beat()
    assert counts(first, second) == [2, 2]
    check_disjoint(first, second)
    assert state_of(bench) == "Stable"


def test_a_member_that_says_nothing_about_its_partitions_still_has_them() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    for _ in range(3):
        answer = first.send(first.request())
        assert answer.member_epoch == 1
        second.beat()
        assert counts(second) == [0]


def test_what_a_leaver_had_goes_to_the_others() -> None:
    bench = Bench()
    bench.create_topic("events", 6)
    clients = [ConsumerClient(bench, name) for name in "abc"]
    for client in clients:
        client.join()
    converge(*clients)
    assert counts(*clients) == [2, 2, 2]
    assert clients[1].leave() == 0
    assert state_of(bench) == "Assigning", "until the next heartbeat"
    converge(clients[0], clients[2])
    assert counts(clients[0], clients[2]) == [3, 3]
    for client in (clients[0], clients[2]):
        client.leave()
    assert state_of(bench) == "Empty"
    assert not len(bench.broker.groups.consumer_sessions)


def test_the_assignment_is_told_when_it_changes_or_when_everything_is_asked_for() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    client = ConsumerClient(bench, "a")
    client.join()
    owned = topic_partitions(client.owned)
    timeout, topics = client.rebalance_ms, list(client.topics)
    assert client.send(client.request(topic_partitions=owned)).assignment is None
    assert client.send(client.request(subscribed_topic_names=topics)).assignment is None
    said = {"rebalance_timeout_ms": timeout, "subscribed_topic_names": topics}
    assert client.send(client.request(**said)).assignment is None
    assert client.send(client.request(**said, topic_partitions=owned)).assignment is not None
    said = {"rebalance_timeout_ms": timeout, "subscribed_topic_regex": ""}
    assert client.send(client.request(**said, topic_partitions=owned)).assignment is not None


def test_a_member_that_leaves_is_told_its_leaving_epoch() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    answer = client.send(client.request(member_epoch=-1))
    assert (answer.error_code, answer.member_id, answer.member_epoch) == (0, "a", -1)
    assert client.beat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_silent_member_is_removed() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    converge(first, second)
    bench.advance(SESSION_MS - 50, step_ms=500)
    assert second.beat() == 0
    bench.advance(50)
    assert first.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    converge(second)
    assert counts(second) == [4]


def test_a_member_that_does_not_give_up_in_time_is_removed() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    first, second = ConsumerClient(bench, "a", rebalance_ms=5_000), ConsumerClient(bench, "b")
    first.join()
    second.join()
    first.send(first.request())
    bench.advance(4_950)
    assert first.send(first.request()).error_code == 0
    bench.advance(100)
    assert first.send(first.request()).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    converge(second)
    assert counts(second) == [4]


def test_a_member_that_gave_up_in_time_stays() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    first, second = ConsumerClient(bench, "a", rebalance_ms=5_000), ConsumerClient(bench, "b")
    first.join()
    second.join()
    first.beat()
    first.beat()
    bench.advance(10_000)
    assert first.beat() == second.beat() == 0


def test_other_topics_are_another_share() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    other = bench.create_topic("others", 3)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    converge(first, second)
    second.subscribe("others")
    converge(first, second)
    assert counts(first, second) == [2, 3]
    assert {topic_id for topic_id, _ in second.owned} == {other}


def test_members_notice_when_topics_come_grow_and_go() -> None:
    bench = Bench()
    first, second = (
        ConsumerClient(bench, "a", topics=("x", "y")),
        ConsumerClient(bench, "b", topics=("x", "y")),
    )
    first.join()
    second.join()
    converge(first, second)
    assert counts(first, second) == [0, 0]
    topic_id = bench.create_topic("x", 2)
    converge(first, second)
    assert counts(first, second) == [1, 1]
    bench.submit(None, Decision(None, [PartitionsAdded(topic_id=topic_id, count=6)]))
    converge(first, second)
    assert counts(first, second) == [3, 3]
    other = bench.create_topic("y", 2)
    bench.submit(None, Decision(None, [TopicDeleted(topic_id=topic_id)]))
    converge(first, second)
    assert first.owned | second.owned == {(other, 0), (other, 1)}


def test_a_topic_of_no_interest_changes_nothing() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    bench.create_topic("boring")
    client.beat()
    assert (client.epoch, membership_of(bench).epoch) == (1, 1)


def test_a_pattern_is_matched_against_all_topics_also_later_ones() -> None:
    bench = Bench()
    first = bench.create_topic("orders-eu", 1)
    bench.create_topic("invoices", 1)
    client = ConsumerClient(bench, "a", topics=(), regex="orders-.*")
    client.join()
    assert client.owned == {(first, 0)}
    second = bench.create_topic("orders-us", 1)
    converge(client)
    assert client.owned == {(first, 0), (second, 0)}


def test_a_pattern_that_is_not_understood_is_refused() -> None:
    bench = Bench()
    client = ConsumerClient(bench, "a", regex="(")
    assert client.join() == ErrorCode.INVALID_REGULAR_EXPRESSION
    assert GROUP not in bench.broker.groups.by_id


def test_the_assignor_that_most_members_want_is_used() -> None:
    bench = Bench()
    topics = [bench.create_topic(name, 2) for name in ("x", "y")]
    clients = [
        ConsumerClient(bench, name, topics=("x", "y"), assignor=assignor)
        for name, assignor in (("a", "range"), ("b", "range"), ("c", "uniform"))
    ]
    for client in clients:
        client.join()
    converge(*clients)
    assert clients[0].owned == {(topic_id, 0) for topic_id in topics}
    assert clients[1].owned == {(topic_id, 1) for topic_id in topics}
    assert clients[2].owned == frozenset()


def test_an_unknown_assignor_is_refused() -> None:
    bench = Bench()
    assert ConsumerClient(bench, "a", assignor="magic").join() == ErrorCode.UNSUPPORTED_ASSIGNOR


# Who speaks.


def test_version_0_gives_ids_to_members() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.member_id = ""
    answer = client.send(client.join_request(), version=0)
    assert answer.error_code == 0
    assert len(answer.member_id) == 36
    assert client.join() == ErrorCode.INVALID_REQUEST, "since version 1 clients bring their own"


@pytest.mark.parametrize(
    "fields",
    (
        {"group_id": ""},
        {"instance_id": ""},
        {"rack_id": ""},
        {"member_id": ""},
        {"rebalance_timeout_ms": -1},
        {"topic_partitions": None},
        {"topic_partitions": topic_partitions(frozenset({(b"t" * 16, 0)}))},
        {"subscribed_topic_names": None},
        {"subscribed_topic_names": []},
        {"member_epoch": -3},
        {"member_epoch": -2},
    ),
)
def test_what_no_member_would_say_is_refused(fields: dict[str, object]) -> None:
    bench = Bench()
    request = ConsumerClient(bench, "a").join_request()
    for name, value in fields.items():
        setattr(request, name, value)
    answer = bench.ask(consumer_group_heartbeat, request, 1).reply
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert answer.error_message


def test_nobody_speaks_for_a_group_that_does_not_exist() -> None:
    bench = Bench()
    client = ConsumerClient(bench, "a")
    client.epoch = 1
    assert client.beat() == ErrorCode.GROUP_ID_NOT_FOUND
    assert client.leave() == ErrorCode.GROUP_ID_NOT_FOUND


def test_a_member_of_another_epoch_is_fenced() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    client.epoch = 2
    assert client.beat() == ErrorCode.FENCED_MEMBER_EPOCH
    stranger = ConsumerClient(bench, "stranger")
    stranger.epoch = 1
    assert stranger.beat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_missed_an_answer_may_ask_again() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    first.beat()
    request = first.request(topic_partitions=topic_partitions(first.owned))
    assert first.send(request).member_epoch == 2, "this answer is lost"
    again = first.send(request)
    assert (again.error_code, again.member_epoch) == (0, 2)
    bold = first.request(topic_partitions=topic_partitions(first.owned | second.owned | {(b"t" * 16, 1)}))
    assert first.send(bold).error_code == ErrorCode.FENCED_MEMBER_EPOCH


def test_a_fenced_member_joins_again_under_its_id_and_gets_its_partitions() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    client = ConsumerClient(bench, "a")
    client.join()
    client.epoch = 7
    assert client.beat() == ErrorCode.FENCED_MEMBER_EPOCH
    assert client.join() == 0
    assert len(client.owned) == 2


def test_a_full_group_takes_nobody_else() -> None:
    bench = Bench(GroupSettings(max_size=1))
    bench.create_topic("events")
    ConsumerClient(bench, "a").join()
    assert ConsumerClient(bench, "b").join() == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert ConsumerClient(bench, "a").join() == 0


# Static members.


def test_a_static_member_that_is_away_keeps_its_place() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    away, here = ConsumerClient(bench, "a", instance_id="i"), ConsumerClient(bench, "b")
    away.join()
    here.join()
    converge(away, here)
    share, epoch = away.owned, membership_of(bench).epoch
    assert away.leave(-2) == 0
    here.beat()
    assert counts(here) == [2]
    back = ConsumerClient(bench, "a2", instance_id="i")
    assert back.join() == 0
    assert back.owned == share
    assert membership_of(bench).epoch == epoch, "nobody else has to move"
    assert set(membership_of(bench).members) == {"a2", "b"}
    assert away.beat() == ErrorCode.FENCED_INSTANCE_ID
    converge(back, here)
    assert membership_of(bench).epoch == epoch
    assert set(membership_of(bench).targets) == {"a2", "b"}


def test_a_static_member_that_goes_away_gives_up_what_it_was_to_give_up() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    away, here = ConsumerClient(bench, "a", instance_id="i"), ConsumerClient(bench, "b")
    away.join()
    here.join()
    away.send(away.request())
    here.beat()
    assert counts(here) == [0]
    away.leave(-2)
    here.beat()
    assert counts(here) == [2]


def test_a_static_member_that_stays_away_loses_its_place() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    away, here = ConsumerClient(bench, "a", instance_id="i"), ConsumerClient(bench, "b")
    away.join()
    here.join()
    converge(away, here)
    away.leave(-2)
    for _ in range(4):
        bench.advance(SESSION_MS // 4, step_ms=500)
        here.beat()
    bench.advance(100)
    converge(here)
    assert counts(here) == [4]


def test_an_instance_that_nobody_knows_is_unknown() -> None:
    bench = Bench()
    bench.create_topic("events")
    ConsumerClient(bench, "a").join()
    stranger = ConsumerClient(bench, "a", instance_id="i")
    assert stranger.leave() == ErrorCode.UNKNOWN_MEMBER_ID


def test_an_instance_id_that_is_in_use_is_not_given_away() -> None:
    bench = Bench()
    bench.create_topic("events")
    first = ConsumerClient(bench, "a", instance_id="i")
    first.join()
    assert ConsumerClient(bench, "b", instance_id="i").join() == ErrorCode.UNRELEASED_INSTANCE_ID
    assert first.beat() == 0


# Restarts.


def test_everything_survives_a_restart_in_the_middle_of_a_move() -> None:
    bench = Bench()
    bench.create_topic("events", 6)
    first, second = ConsumerClient(bench, "a"), ConsumerClient(bench, "b")
    first.join()
    second.join()
    first.beat()
    before = membership_of(bench).whole()
    bench.restart()
    assert membership_of(bench).whole() == before
    converge(first, second)
    assert counts(first, second) == [3, 3]


def test_a_snapshot_holds_all_of_it() -> None:
    bench = Bench()
    bench.create_topic("events", 6)
    first, second = ConsumerClient(bench, "a", instance_id="i"), ConsumerClient(bench, "b", regex="e.*")
    first.join()
    second.join()
    first.beat()
    before = membership_of(bench).whole()
    out = bytearray()
    bench.group.part().encode(out, 0, [])
    part, _ = GroupPart.decode(memoryview(out), 0, 0)
    bench.broker.groups = Groups(bench.settings)
    bench.broker.groups.load(part)
    assert membership_of(bench).whole() == before
    converge(first, second)


def test_after_a_restart_silence_is_noticed() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    first, second = ConsumerClient(bench, "a", rebalance_ms=5_000), ConsumerClient(bench, "b")
    first.join()
    second.join()
    first.beat()
    bench.restart()
    bench.advance(5_050)
    assert set(membership_of(bench).members) == {"b"}, "it was to give up a partition"
    bench.advance(SESSION_MS, step_ms=500)
    assert state_of(bench) == "Empty"


def test_heartbeats_without_news_are_not_journaled() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    client.beat()
    entries = len(bench.journal)
    for _ in range(5):
        client.beat()
    everything = client.join_request()
    everything.member_epoch, everything.topic_partitions = client.epoch, topic_partitions(client.owned)
    assert client.send(everything).assignment is not None
    assert len(bench.journal) == entries


# Offsets and tools.


def commit(bench: Bench, member_id: str, epoch: int, version: int = 9) -> int:
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=5, committed_metadata=None)
    request = OffsetCommitRequest(
        group_id=GROUP,
        generation_id_or_member_epoch=epoch,
        member_id=member_id,
        topics=[OffsetCommitRequestTopic(name="events", partitions=[part])],
    )
    error: int = bench.ask(offset_commit, request, version).reply.topics[0].partitions[0].error_code
    return error


def fetch(bench: Bench, member_id: str | None, epoch: int) -> int:
    group = OffsetFetchRequestGroup(group_id=GROUP, member_id=member_id, member_epoch=epoch, topics=None)
    error: int = bench.ask(offset_fetch, OffsetFetchRequest(groups=[group]), 9).reply.groups[0].error_code
    return error


def test_offsets_are_committed_and_fetched_in_the_members_epoch() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    assert commit(bench, "a", 1) == 0
    assert commit(bench, "a", 0) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit(bench, "b", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(bench, "", -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(bench, "a", 1, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert fetch(bench, "a", 1) == 0
    assert fetch(bench, "a", 2) == ErrorCode.STALE_MEMBER_EPOCH
    assert fetch(bench, "b", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert fetch(bench, None, -1) == 0
    groups = bench.broker.groups
    assert groups.refuses_txn_commit(GROUP, "a", 1, None) is None
    assert groups.refuses_txn_commit(GROUP, "a", 0, None) == ErrorCode.ILLEGAL_GENERATION
    assert groups.refuses_txn_commit(GROUP, "", -1, None) is None
    client.leave()
    assert commit(bench, "", -1) == 0


def test_offsets_of_topics_that_members_read_are_not_deleted() -> None:
    bench = Bench()
    for name in ("events", "orders-eu", "old"):
        bench.create_topic(name)
        bench.commit(name, 1)
    ConsumerClient(bench, "a", regex="orders-.*").join()
    answers = {}
    for name in ("events", "orders-eu", "old"):
        part = OffsetDeleteRequestPartition(partition_index=0)
        topic = OffsetDeleteRequestTopic(name=name, partitions=[part])
        reply = bench.ask(offset_delete, OffsetDeleteRequest(group_id=GROUP, topics=[topic]), 0).reply
        answers[name] = (reply.error_code, reply.topics[0].partitions[0].error_code)
    read = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    assert answers == {"events": (0, read), "orders-eu": (0, read), "old": (0, 0)}


def test_a_consumer_group_is_described_and_listed_as_such() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events", 2)
    client = ConsumerClient(bench, "a", instance_id="i")
    client.join()
    request = ConsumerGroupDescribeRequest(group_ids=[GROUP, "none", ""])
    group, none, nameless = bench.ask(consumer_group_describe, request, 1).reply.groups
    assert (group.error_code, group.group_state, group.assignor_name) == (0, "Stable", "uniform")
    assert (group.group_epoch, group.assignment_epoch) == (1, 1)
    (member,) = group.members
    assert (member.member_id, member.instance_id, member.member_epoch, member.member_type) == ("a", "i", 1, 1)
    assert member.subscribed_topic_names == ["events"]
    (assigned,) = member.assignment.topic_partitions
    assert (assigned.topic_id, assigned.topic_name, assigned.partitions) == (topic_id, "events", [0, 1])
    assert member.target_assignment == member.assignment
    assert none.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert nameless.error_code == ErrorCode.INVALID_GROUP_ID
    (listed,) = bench.ask(list_groups, ListGroupsRequest(types_filter=["consumer"]), 5).reply.groups
    assert (listed.group_type, listed.group_state, listed.protocol_type) == ("consumer", "Stable", "consumer")
    (classic,) = bench.ask(describe_groups, DescribeGroupsRequest(groups=[GROUP]), 6).reply.groups
    assert classic.error_code == ErrorCode.GROUP_ID_NOT_FOUND, "tools then ask the other way"


def test_only_an_empty_consumer_group_is_deleted_and_its_offsets_expire() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = ConsumerClient(bench, "a")
    client.join()
    commit(bench, "a", 1)

    def deleted() -> int:
        request = DeleteGroupsRequest(groups_names=[GROUP])
        error: int = bench.ask(delete_groups, request, 2).reply.results[0].error_code
        return error

    assert deleted() == ErrorCode.NON_EMPTY_GROUP
    for _ in range(48):
        bench.advance(1_800_000, step_ms=1_800_000)
        assert client.join() == 0, "in this test it is silent for long, but comes back"
    client.leave()
    bench.advance(6 * 24 * 3_600_000, step_ms=600_000)
    assert bench.fetch("events").committed_offset == 5
    bench.advance(25 * 3_600_000, step_ms=600_000)
    assert GROUP not in bench.broker.groups.by_id
    again = ConsumerClient(bench, "a")
    again.join()
    again.leave()
    assert deleted() == 0


def test_an_answer_fits_every_version() -> None:
    bench = Bench()
    bench.create_topic("events")
    for version in (0, 1):
        asked: Asked = bench.ask(
            consumer_group_heartbeat, ConsumerClient(bench, f"m{version}").join_request(), version
        )
        assert asked.reply.error_code == 0
    assert isinstance(ConsumerClient(bench, "x").request(), ConsumerGroupHeartbeatRequest)
