"""From the classic protocol to the consumer protocol and back, with members in the group."""

from __future__ import annotations

import os
import random

import pytest
from consumer_cases import ConsumerClient, membership_of, state_of
from group_cases import GROUP, Asked, Bench, Client, settle, subscription

from semel.broker.groups.assignors import Partitions, TopicPartition
from semel.broker.groups.classic import ClassicMembership, subscription_of
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.consumer_group_describe import consumer_group_describe
from semel.broker.groups.leave_group import leave_group
from semel.broker.groups.migration import read_assignment
from semel.broker.groups.settings import GroupSettings
from semel.broker.topics import Topic
from semel.wire.errors import ErrorCode
from semel.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from semel.wire.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from semel.wire.messages.consumer_protocol_assignment import TopicPartition as Assigned
from semel.wire.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from semel.wire.messages.consumer_protocol_subscription import TopicPartition as Owned
from semel.wire.messages.leave_group import LeaveGroupRequest, MemberIdentity

SEEDS = int(os.environ.get("TEST_SIMULATION_SEEDS", "30"))
NOTHING: Partitions = frozenset()


class ClassicConsumer:
    """A consumer of the classic protocol: joins when it is told to, and assigns when it leads."""

    def __init__(
        self, bench: Bench, name: str, *, cooperative: bool = False, instance_id: str | None = None
    ) -> None:
        self.client = Client(bench, name, instance_id=instance_id)
        self.bench = bench
        self.cooperative = cooperative
        self.owned: Partitions = NOTHING
        self.syncing: Asked | None = None
        self.is_out = True

    def step(self) -> None:
        """Whatever a consumer would do next."""
        client = self.client
        if client.asked is not None and not client.asked.is_answered:
            return
        if self.syncing is not None:
            self.read_sync()
            return
        if not self.is_out:
            error = client.beat()
            if error == 0:
                return
            if error != ErrorCode.REBALANCE_IN_PROGRESS:
                self.lose(error)
        self.join()

    def lose(self, error: int) -> None:
        """Whoever is not in this generation has nothing; an id is good as long as nobody says otherwise."""
        self.owned = NOTHING
        self.client.generation = -1
        if error != ErrorCode.ILLEGAL_GENERATION:
            self.client.member_id = ""

    def join(self) -> None:
        self.is_out = True
        if not self.cooperative:
            self.owned = NOTHING
        self.client.protocols = [("range", self.metadata())]
        self.client.join()
        self.read_join()

    def metadata(self) -> bytes:
        out = bytearray((0, 1))
        names = {topic.topic_id: topic.name for topic in self.catalog.values()}
        owned: dict[str, list[int]] = {}
        for topic_id, index in sorted(self.owned):
            owned.setdefault(names[topic_id], []).append(index)
        ConsumerProtocolSubscription(
            topics=["events"],
            owned_partitions=[Owned(topic=name, partitions=indexes) for name, indexes in owned.items()],
        ).encode(out, 1, [])
        return bytes(out)

    @property
    def catalog(self) -> dict[str, Topic]:
        return self.bench.broker.catalog.by_name

    def read_join(self) -> None:
        response = self.client.read_join()
        if response is None:
            return
        if response.error_code == ErrorCode.REBALANCE_IN_PROGRESS:
            return
        if response.error_code != 0:
            self.lose(response.error_code)
            return
        shares = {}
        if response.leader == response.member_id:
            shares = self.assign({member.member_id: member.metadata for member in response.members})
        self.syncing = self.client.sync(shares)
        self.read_sync()

    def assign(self, members: dict[str, bytes]) -> dict[str, bytes]:
        """In turn; but what a member still has goes to another one only after it was given up."""
        owners = {
            index: member_id
            for member_id, metadata in members.items()
            for owned in (subscription_of(metadata) or ConsumerProtocolSubscription()).owned_partitions
            for index in owned.partitions
        }
        member_ids = sorted(members)
        shares: dict[str, list[int]] = {member_id: [] for member_id in member_ids}
        for index in range(len(self.catalog["events"].partitions)):
            chosen = member_ids[index % len(member_ids)]
            if owners.get(index, chosen) == chosen:
                shares[chosen].append(index)
        return {member_id: assignment(indexes) for member_id, indexes in shares.items()}

    def read_sync(self) -> None:
        assert self.syncing is not None
        if not self.syncing.is_answered:
            return
        response = self.syncing.reply
        self.syncing = None
        if response.error_code == 0:
            before = self.owned
            self.owned = read_assignment(response.assignment, self.bench.broker.catalog)
            self.is_out = False
            if self.cooperative and before - self.owned:
                self.join()
        elif response.error_code != ErrorCode.REBALANCE_IN_PROGRESS:
            self.lose(response.error_code)

    def answered(self) -> None:
        if (
            self.client.asked is not None
            and self.client.asked.is_answered
            and self.syncing is None
            and self.is_out
        ):
            self.read_join()

    def leave(self) -> None:
        self.client.leave()
        self.lose(0)
        self.is_out = True
        self.client.asked = None
        self.syncing = None


def assignment(indexes: list[int]) -> bytes:
    out = bytearray((0, 1))
    given = [Assigned(topic="events", partitions=indexes)]
    ConsumerProtocolAssignment(assigned_partitions=given).encode(out, 1, [])
    return bytes(out)


def run(*clients: ClassicConsumer | ConsumerClient, rounds: int = 12, pause_ms: int = 0) -> None:
    """Everybody does what they do, round after round, and no partition ever has two owners."""
    for _ in range(rounds):
        clients[0].bench.advance(pause_ms, step_ms=500)
        for client in clients:
            if isinstance(client, ConsumerClient):
                assert client.beat() == 0
            else:
                client.answered()
                client.step()
            check_disjoint(*clients)


def check_disjoint(*clients: ClassicConsumer | ConsumerClient) -> None:
    owned: list[TopicPartition] = [partition for client in clients for partition in client.owned]
    assert len(owned) == len(set(owned)), "a partition has two owners"


def check_share(*clients: ClassicConsumer | ConsumerClient, partitions: int = 6) -> None:
    check_disjoint(*clients)
    sizes = [len(client.owned) for client in clients]
    assert sum(sizes) == partitions, sizes
    assert max(sizes) - min(sizes) <= 1, sizes


@pytest.mark.parametrize("cooperative", (False, True))
def test_an_application_moves_to_the_consumer_protocol_one_member_after_the_other(cooperative: bool) -> None:
    bench = Bench()
    bench.create_topic("events", 6)
    old = [ClassicConsumer(bench, name, cooperative=cooperative) for name in "abc"]
    run(*old)
    check_share(*old)
    assert isinstance(bench.group.membership, ClassicMembership)
    generation = bench.group.membership.generation
    new: list[ConsumerClient] = []
    for number, leaving in enumerate(old):
        newcomer = ConsumerClient(bench, f"new{number}")
        assert newcomer.join() == 0
        new.append(newcomer)
        remaining = old[number:]
        run(*remaining, *new)
        check_share(*remaining, *new)
        assert state_of(bench) == "Stable"
        leaving.leave()
        run(*old[number + 1 :], *new)
        check_share(*old[number + 1 :], *new)
    membership = membership_of(bench)
    assert set(membership.members) == {"new0", "new1", "new2"}
    assert membership.epoch > generation, "epochs go on where generations ended"


@pytest.mark.parametrize("cooperative", (False, True))
def test_an_application_moves_back_one_member_after_the_other(cooperative: bool) -> None:
    bench = Bench()
    bench.create_topic("events", 6)
    new = [ConsumerClient(bench, name) for name in "ab"]
    for client in new:
        client.join()
    run(*new)
    check_share(*new)
    epoch = membership_of(bench).epoch
    old = [ClassicConsumer(bench, name, cooperative=cooperative) for name in "cd"]
    run(*new, *old)
    check_share(*new, *old)
    new[0].leave()
    run(new[1], *old)
    check_share(new[1], *old)
    assert isinstance(bench.group.membership, ConsumerMembership)
    new[1].leave()
    assert isinstance(bench.group.membership, ClassicMembership)
    assert bench.state == "PreparingRebalance"
    run(*old)
    check_share(*old)
    assert bench.state == "Stable"
    assert bench.group.membership.generation > epoch
    bench.restart()
    assert isinstance(bench.group.membership, ClassicMembership)
    run(*old)
    check_share(*old)


def test_on_the_way_back_silence_is_noticed_and_old_deadlines_are_not() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    new, other = ConsumerClient(bench, "new"), ConsumerClient(bench, "other")
    old = Client(bench, "old", rebalance_ms=6_000)
    new.join()
    old.join()
    other.join()
    assert old.beat() == ErrorCode.REBALANCE_IN_PROGRESS, "it has 6 s for that"
    new.leave()
    other.leave()
    bench.advance(5_000)
    old.send_join()
    assert bench.state == "CompletingRebalance"
    bench.advance(2_000)
    assert set(bench.group.membership.members) == {old.member_id}
    bench.advance(20_000)
    assert bench.state == "Empty"


def test_a_restart_on_the_way_back_is_no_harm() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    new, old = ConsumerClient(bench, "a"), ClassicConsumer(bench, "b")
    new.join()
    run(new, old)
    new.leave()
    bench.restart()
    assert isinstance(bench.group.membership, ConsumerMembership), "the rebalance had not finished"
    old.client.asked = old.syncing = None
    run(old)
    check_share(old, partitions=4)
    assert isinstance(bench.group.membership, ClassicMembership)
    bench.restart()
    assert bench.state == "Stable"


def test_a_group_that_is_empty_is_whatever_comes_first() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    classic = Client(bench, "a")
    settle(classic)
    classic.leave()
    consumer = ConsumerClient(bench, "b")
    assert consumer.join() == 0
    assert consumer.epoch == 3
    consumer.leave()
    again = Client(bench, "a")
    again.join()
    assert again.generation == 5
    assert bench.state == "CompletingRebalance"
    bench.restart()
    assert isinstance(bench.group.membership, ConsumerMembership)
    assert bench.group.membership.epoch == 4
    again.member_id = ""
    settle(again)
    bench.restart()
    assert bench.state == "Stable"


def test_members_that_wait_in_a_classic_rebalance_are_sent_to_join_again() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    waiting = second.join()
    assert not waiting.is_answered
    ConsumerClient(bench, "new").join()
    assert waiting.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert not bench.broker.groups.parked
    assert (len(bench.broker.groups.sessions), len(bench.broker.groups.joins)) == (0, 0)
    assert second.send_join().reply.error_code == 0
    assert first.beat() == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_group_that_is_not_of_consumers_stays_what_it_is() -> None:
    bench = Bench()
    bench.create_topic("events")
    worker = Client(bench, "a")
    worker.protocol_type = "connect"
    settle(worker)
    assert ConsumerClient(bench, "b").join() == ErrorCode.GROUP_ID_NOT_FOUND
    assert bench.state == "Stable"
    assert worker.beat() == 0


def test_a_worker_of_something_else_cannot_join_a_consumer_group() -> None:
    bench = Bench()
    bench.create_topic("events")
    ConsumerClient(bench, "a").join()
    worker = Client(bench, "b")
    worker.protocol_type = "connect"
    assert worker.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    garbage = Client(bench, "c", protocols=[("range", b"?")])
    assert garbage.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_classic_members_of_a_consumer_group_are_held_to_the_same_rules() -> None:
    bench = Bench(GroupSettings(max_size=3))
    bench.create_topic("events", 2)
    ConsumerClient(bench, "new").join()
    old = Client(bench, "old", instance_id="i")
    old.join()
    foreign = Client(bench, "x", protocols=[("other", subscription("events"))])
    assert foreign.send_join().reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    unknown = Client(bench, "y", instance_id="unknown")
    unknown.member_id = "made-up"
    assert unknown.send_join().reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    fenced = Client(bench, "z", instance_id="i")
    fenced.member_id = "made-up"
    assert fenced.send_join().reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    dynamic = Client(bench, "d")
    assert dynamic.send_join().reply.error_code == ErrorCode.MEMBER_ID_REQUIRED
    dynamic.join()
    assert Client(bench, "e").send_join().reply.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert dynamic.send_join().reply.error_code == 0, "who is in may join again"
    dynamic.protocols = [("other", b"")]
    assert dynamic.synced().error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    poser = Client(bench, "p")
    poser.member_id, poser.generation = "new", 1
    assert poser.beat() == poser.synced().error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_tool_removes_classic_members_of_a_consumer_group() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    new = ConsumerClient(bench, "new")
    new.join()
    old = Client(bench, "old", instance_id="i")
    old.join()
    epoch = membership_of(bench).epoch
    strangers = [MemberIdentity(member_id="x"), MemberIdentity(member_id="", group_instance_id="unknown")]
    request = LeaveGroupRequest(group_id=GROUP, members=strangers)
    answers = bench.ask(leave_group, request, 5).reply.members
    assert {answer.error_code for answer in answers} == {ErrorCode.UNKNOWN_MEMBER_ID}
    assert membership_of(bench).epoch == epoch
    twice = [MemberIdentity(member_id="", group_instance_id="i")] * 2
    answers = bench.ask(leave_group, LeaveGroupRequest(group_id=GROUP, members=twice), 5).reply.members
    assert [answer.error_code for answer in answers] == [0, ErrorCode.UNKNOWN_MEMBER_ID]
    assert set(membership_of(bench).members) == {"new"}


def test_a_classic_member_that_falls_silent_or_does_not_come_back_is_removed() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    new = ConsumerClient(bench, "new")
    new.join()
    silent, late = Client(bench, "silent"), Client(bench, "late", rebalance_ms=6_000)
    silent.join()
    late.join()
    assert late.beat() in (0, ErrorCode.REBALANCE_IN_PROGRESS)
    for _ in range(4):
        new.beat()
    another = ConsumerClient(bench, "another")
    another.join()
    assert late.beat() == ErrorCode.REBALANCE_IN_PROGRESS
    for _ in range(7):
        bench.advance(1_000)
        late.beat()
    assert set(membership_of(bench).members) == {"new", "another", silent.member_id}
    bench.advance(4_000)
    assert set(membership_of(bench).members) == {"new", "another"}


def test_a_classic_member_of_old_has_its_session_as_rebalance_timeout() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    ConsumerClient(bench, "new").join()
    old = Client(bench, "old", version=0)
    old.join()
    (member,) = [one for one in membership_of(bench).members.values() if one.classic is not None]
    assert member.rebalance_timeout_ms == old.session_ms


def test_a_static_consumer_moves_to_the_new_protocol_under_its_instance_id() -> None:
    bench = Bench()
    bench.create_topic("events", 4)
    old = ClassicConsumer(bench, "a", instance_id="i")
    other = ConsumerClient(bench, "b")
    other.join()
    run(other, old)
    check_share(other, old, partitions=4)
    new = ConsumerClient(bench, "a2", instance_id="i")
    assert new.join() == ErrorCode.UNRELEASED_INSTANCE_ID
    back = ClassicConsumer(bench, "a", instance_id="i")
    back.step()
    assert old.client.beat() == ErrorCode.FENCED_INSTANCE_ID
    run(other, back)
    check_share(other, back, partitions=4)
    back.leave()
    assert new.join() == 0
    run(other, new)
    check_share(other, new, partitions=4)


def test_a_classic_member_joins_again_only_when_there_is_something_to_get() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    new = ConsumerClient(bench, "new")
    new.join()
    old = Client(bench, "old")
    old.join()
    assert old.beat() == 0, "the other one still has it"
    new.beat()
    assert old.beat() == 0
    new.beat()
    assert old.beat() == ErrorCode.REBALANCE_IN_PROGRESS, "now it is free"
    old.join()
    assert old.beat() == 0


def test_the_description_tells_members_apart() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    new, old = ConsumerClient(bench, "a"), ClassicConsumer(bench, "b")
    new.join()
    run(new, old)
    request = ConsumerGroupDescribeRequest(group_ids=[GROUP])
    (group,) = bench.ask(consumer_group_describe, request, 1).reply.groups
    assert {member.client_id: member.member_type for member in group.members} == {"a": 1, "b": 0}


def test_a_classic_member_commits_in_its_generation() -> None:
    bench = Bench()
    bench.create_topic("events", 2)
    new, old = ConsumerClient(bench, "a"), ClassicConsumer(bench, "b")
    new.join()
    run(new, old)
    assert bench.commit("events", 1, member=old.client) == 0
    old.client.generation -= 1
    assert bench.commit("events", 2, member=old.client) == ErrorCode.ILLEGAL_GENERATION


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 10))
def test_no_partition_has_two_owners_whoever_comes_and_goes(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        try:
            random_history(random.Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def random_history(dice: random.Random) -> None:
    bench = Bench()
    bench.create_topic("events", 5)
    everybody: list[ClassicConsumer | ConsumerClient] = []
    names = iter(f"m{number}" for number in range(1_000))
    for _ in range(60):
        action = dice.random()
        if action < 0.12 and len(everybody) < 5:
            everybody.append(newcomer(bench, next(names), dice))
        elif action < 0.2 and everybody:
            leaver = everybody.pop(dice.randrange(len(everybody)))
            leaver.leave()
        elif action < 0.25:
            bench.restart()
            for client in everybody:
                if isinstance(client, ClassicConsumer):
                    client.client.asked = client.syncing = None
        elif everybody:
            act(dice.choice(everybody), dice)
        check_disjoint(*everybody)
        check_journal(bench)
    for client in everybody:
        act(client, dice)
    if everybody:
        # Who left in the middle of a rebalance is back after a restart, until its session ends.
        run(*everybody, rounds=40, pause_ms=2_000)
        check_share(*everybody, partitions=5)


def newcomer(bench: Bench, name: str, dice: random.Random) -> ClassicConsumer | ConsumerClient:
    if dice.random() < 0.5:
        return ClassicConsumer(bench, name, cooperative=dice.random() < 0.5)
    client = ConsumerClient(bench, name)
    assert client.join() == 0
    return client


def act(client: ClassicConsumer | ConsumerClient, dice: random.Random) -> None:
    if isinstance(client, ClassicConsumer):
        client.answered()
        client.step()
    elif client.beat() != 0:
        assert client.join() == 0


def check_journal(bench: Bench) -> None:
    group = bench.broker.groups.by_id.get(GROUP)
    if group is None or not isinstance(group.journaled, ConsumerMembership):
        return
    before, whole = bench.broker, group.journaled.whole()
    bench.restart()
    replayed = bench.group.journaled
    bench.broker = before
    assert isinstance(replayed, ConsumerMembership)
    assert replayed.whole() == whole
    owners = {
        partition: member.member_id
        for member in replayed.members.values()
        for partition in member.assigned | member.revoking
    }
    assert owners == replayed.owners == group.journaled.owners
    assert replayed.static_ids == group.journaled.static_ids
