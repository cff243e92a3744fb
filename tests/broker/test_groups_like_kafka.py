"""The same requests about groups to this broker and to Apache Kafka: the same answers, in every version.

A script is a function that sends requests and names what matters of each answer. Both brokers run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from broker_process import BrokerProcess
from group_runs import (
    PAUSE_S,
    REBALANCE_MS,
    UNKNOWN_GROUP,
    Consumer,
    Run,
    assignment,
    know_the_topic,
    settle,
    stable_pair,
    subscription,
)
from kafka_process import KafkaProcess

from semel.wire.errors import ErrorCode
from semel.wire.messages import join_group as joining


def joining_a_group(run: Run) -> None:
    for version in range(10):
        member = run.member(group=f"{run.group}-{version}", version=version)
        run.find(member.group)
        member.send_join()
        code = member.read_join(f"v{version}: first")
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            member.send_join()
            member.read_join(f"v{version}: with the id")
        stranger = run.member(group=member.group, version=version)
        stranger.send_join(member_id="stranger")
        stranger.read_join(f"v{version}: a made-up id")
        for session_ms in (5_999, 1_800_001):
            stranger.send_join(session_timeout_ms=session_ms)
            stranger.read_join(f"v{version}: a session of {session_ms}")
        stranger.send_join(group_id="")
        stranger.read_join(f"v{version}: no group")
        stranger.send_join(group_id=UNKNOWN_GROUP, member_id="stranger")
        stranger.read_join(f"v{version}: a made-up id in no group")
        stranger.send_join(protocols=[])
        stranger.read_join(f"v{version}: no protocols")
        stranger.send_join(protocol_type="")
        stranger.read_join(f"v{version}: no protocol type")
        stranger.send_join(protocol_type="connect")
        stranger.read_join(f"v{version}: another protocol type")
        stranger.send_join(protocols=[joining.JoinGroupRequestProtocol(name="other", metadata=b"")])
        stranger.read_join(f"v{version}: another protocol")
        member.send_join()
        member.read_join(f"v{version}: again, nothing changed")


def a_rebalance(run: Run) -> None:
    leader, follower = stable_pair(run)
    run.state("stable")
    follower.send_join()
    follower.read_join("a follower joins again")
    follower.sync("a follower syncs again")
    leader.sync("the leader syncs again", {leader.member_id: assignment(run.topic, 0)})
    follower.protocols = [("range", subscription(run.topic, "more"))]
    follower.send_join()
    while leader.beat("") == 0:
        time.sleep(PAUSE_S)
    run.state("preparing")
    leader.beat("a heartbeat while preparing")
    leader.sync("a sync while preparing")
    run.commit(
        "a commit while preparing",
        generation_id_or_member_epoch=leader.generation,
        member_id=leader.member_id,
    )
    leader.send_join()
    leader.read_join("the leader in the next generation")
    follower.read_join("the follower in the next generation")
    run.state("completing")
    leader.beat("a heartbeat while completing")
    run.commit(
        "a commit while completing",
        generation_id_or_member_epoch=leader.generation,
        member_id=leader.member_id,
    )
    leader.send_join()
    leader.read_join("the leader again while completing")
    follower.beat("an old generation", generation_id=leader.generation - 1)
    follower.sync("a sync of an old generation", generation_id=leader.generation - 1)
    follower.send(follower.sync_request(), 5)
    leader.sync("the leader's sync", {follower.member_id: assignment(run.topic, 0, 1, 2, 3)})
    follower.read_sync("the follower's sync")
    follower.leave("the follower leaves")
    while leader.beat("") == 0:
        time.sleep(PAUSE_S)
    leader.send_join()
    leader.read_join("the leader alone")
    leader.sync("and its sync", {leader.member_id: assignment(run.topic, 1)})
    leader.leave("the leader leaves")
    run.state("empty")
    leader.beat("a heartbeat in an empty group")
    leader.sync("a sync in an empty group")
    leader.send_join()
    leader.read_join("an old id in an empty group")
    newcomer = run.member()
    newcomer.join()
    run.note("generations go on", newcomer.generation)


def syncing_and_beating(run: Run) -> None:
    leader, follower = stable_pair(run)
    for version in range(6):
        follower.sync(f"sync v{version}", version=version)
        follower.sync(f"sync v{version}: another generation", version=version, generation_id=77)
        follower.sync(f"sync v{version}: a stranger", version=version, member_id="stranger")
        follower.sync(f"sync v{version}: no group", version=version, group_id="")
        follower.sync(f"sync v{version}: an unknown group", version=version, group_id=UNKNOWN_GROUP)
    follower.sync("sync: another protocol", protocol_name="other")
    follower.sync("sync: another type", protocol_type="connect")
    follower.sync("sync: no protocol", protocol_name=None)
    follower.sync("sync: no type", protocol_type=None)
    for version in range(5):
        follower.beat(f"beat v{version}", version)
        follower.beat(f"beat v{version}: another generation", version, generation_id=77)
        follower.beat(f"beat v{version}: a stranger", version, member_id="stranger")
        follower.beat(f"beat v{version}: no group", version, group_id="")
        follower.beat(f"beat v{version}: an unknown group", version, group_id=UNKNOWN_GROUP)
    follower.beat("beat: an unknown instance", group_instance_id="i")
    follower.sync("sync: an unknown instance", group_instance_id="i")
    leader.beat("and the leader is well")


def leaving_a_group(run: Run) -> None:
    for version in range(6):
        member = run.member(group=f"{run.group}-{version}")
        run.find(member.group)
        member.join()
        member.leave(f"v{version}: a stranger", version, member_id="stranger")
        member.leave(f"v{version}: no group", version, group_id="")
        member.leave(f"v{version}: an unknown group", version, group_id=UNKNOWN_GROUP)
        if version >= 3:
            member.leave(f"v{version}: an unknown instance", version, member_id="", group_instance_id="i")
            member.leave(f"v{version}: another's instance", version, group_instance_id="i")
        member.leave(f"v{version}", version)
        member.leave(f"v{version}: again", version)
    fresh = run.member()
    fresh.send_join()
    fresh.read_join()
    fresh.leave("an id that was not used")


def static_members(run: Run) -> None:
    for version in range(5, 10):
        group = f"{run.group}-{version}"
        run.find(group)
        leader, follower = stable_pair(run, group=group, instance_id="i", version=version)
        back = run.member(group=group, instance_id=follower.instance_id, version=version)
        back.send_join()
        back.read_join(f"v{version}: a follower is back")
        run.note(f"v{version}: it knows the leader", back.leader == leader.member_id)
        back.sync(f"v{version}: it has its share")
        follower.beat(f"v{version}: beat of the old one")
        follower.sync(f"v{version}: sync of the old one")
        follower.send_join()
        follower.read_join(f"v{version}: join of the old one")
        follower.leave(f"v{version}: leaving of the old one")
        run.commit(
            f"v{version}: commit of the old one",
            group_id=group,
            generation_id_or_member_epoch=follower.generation,
            member_id=follower.member_id,
            group_instance_id=follower.instance_id,
        )
        again = run.member(group=group, instance_id="i", version=version)
        again.send_join()
        again.read_join(f"v{version}: the leader is back")
        again.sync(f"v{version}: it has its share, too")
        run.state(f"v{version}: nobody noticed", group=group)
        unknown = run.member(group=group, instance_id="unknown", version=version)
        unknown.send_join(member_id="made-up")
        unknown.read_join(f"v{version}: a made-up id with an unknown instance")
        back.leave(f"v{version}: a tool removes an instance", member_id="")
        run.state(f"v{version}: one is left", group=group)


def offsets(run: Run) -> None:
    run.fetch("nothing yet")
    run.fetch("nothing at all yet", everything=True)
    for version in range(2, 10):
        run.commit(f"commit v{version}", version, offset=version)
        run.fetch(f"after commit v{version}")
        run.commit(f"commit v{version}: unknown topic", version, topic="nowhere")
        run.commit(f"commit v{version}: unknown partition", version, index=99)
        run.commit(f"commit v{version}: too much metadata", version, metadata="x" * 4097)
        run.commit(f"commit v{version}: enough metadata", version, metadata="x" * 4096, index=1)
        run.commit(f"commit v{version}: no metadata", version, metadata=None, index=2)
        run.commit(
            f"commit v{version}: a generation of nobody",
            version,
            group_id=UNKNOWN_GROUP,
            generation_id_or_member_epoch=3,
            member_id="x",
        )
        run.commit(
            f"commit v{version}: a generation of a simple group",
            version,
            generation_id_or_member_epoch=3,
            member_id="x",
        )
    run.commit("commit v10", 10, offset=10)
    run.commit("commit v10: unknown id", 10, topic_id=b"?" * 16)
    for version in range(1, 10):
        run.fetch(f"fetch v{version}", version, indexes=[0, 2, 3])
        run.fetch(f"fetch v{version}: unknown topic", version, topic="nowhere")
        run.fetch(f"fetch v{version}: unknown partition", version, indexes=[99])
        run.fetch(f"fetch v{version}: unknown group", version, group_id=UNKNOWN_GROUP)
        if version >= 2:
            run.fetch(
                f"fetch v{version}: unknown group, everything",
                version,
                group_id=UNKNOWN_GROUP,
                everything=True,
            )
    run.fetch("fetch v10", 10, indexes=[0, 3])
    run.fetch("fetch v10: unknown id", 10, topic_id=b"?" * 16)
    member = run.member()
    member.join()
    member.ask(member.sync_request(), 5)
    run.commit("commit from outside")
    run.commit(
        "commit of a member", generation_id_or_member_epoch=member.generation, member_id=member.member_id
    )
    run.commit("commit of a generation alone", generation_id_or_member_epoch=member.generation)
    run.commit("commit of an id alone", member_id=member.member_id)
    run.commit(
        "commit of another generation",
        generation_id_or_member_epoch=member.generation + 1,
        member_id=member.member_id,
    )
    run.commit("commit of a stranger", generation_id_or_member_epoch=member.generation, member_id="x")
    run.fetch("a fetch by a member", member_id=member.member_id, member_epoch=member.generation)
    run.fetch("a fetch by a stranger", member_id="stranger", member_epoch=5)


def forgetting_offsets(run: Run) -> None:
    run.forget("no group", group_id="")
    run.forget("an unknown group", group_id=UNKNOWN_GROUP)
    run.commit("commit")
    run.forget("an unknown topic", topic="nowhere")
    run.forget("an unknown partition", index=99)
    run.forget("nothing there", index=3)
    run.forget("an offset")
    run.fetch("it is gone")
    run.commit("commit again")
    member = run.member()
    member.join()
    run.forget("while completing")
    member.ask(member.sync_request(), 5)
    run.forget("a topic that is read")
    other = f"{run.group}-connect"
    run.find(other)
    worker = run.member(group=other, protocol_type="connect", protocols=[("own", b"x")])
    worker.join()
    run.forget("a group of workers", group_id=other)


def describing_and_deleting(run: Run) -> None:
    for version in range(7):
        run.state(f"v{version}: unknown", version)
    run.listed("nothing yet")
    run.commit("commit")
    for version in range(7):
        run.state(f"v{version}: simple", version)
    for version in range(6):
        run.listed(f"listed v{version}: simple", version)
    leader, follower = stable_pair(run)
    for version in range(7):
        run.state(f"v{version}: stable", version)
    for version in range(6):
        run.listed(f"listed v{version}: stable", version)
    run.listed("by state", states_filter=["stable", "Dead"])
    run.listed("by another state", states_filter=["Empty"])
    run.listed("by type", types_filter=["Classic"])
    run.listed("by another type", types_filter=["consumer"])
    run.delete("a stable group and an unknown one", run.group, "nowhere")
    leader.leave("the leader leaves")
    follower.leave("the follower leaves")
    run.state("empty")
    run.listed("when empty")
    run.delete("an empty group", run.group)
    run.state("deleted")
    run.fetch("offsets of a deleted group")
    run.delete("again", run.group)


def what_no_consumer_says(run: Run) -> None:
    first = Consumer(run)
    first.beat("a heartbeat of nobody", member_epoch=1)
    first.beat("leaving as nobody", member_epoch=-1)
    first.join("no group", group_id="")
    first.join("no id", member_id="")
    first.join("an empty instance", instance_id="")
    first.join("an empty rack", rack_id="")
    first.join("no timeout", rebalance_timeout_ms=-1)
    first.join("no partitions said", topic_partitions=None)
    first.join("partitions at the start", topic_partitions=[0])
    first.join("no topics", subscribed_topic_names=None)
    first.join("an unknown assignor", server_assignor="magic")
    first.join("a broken pattern", subscribed_topic_names=None, subscribed_topic_regex="(")
    first.beat("an epoch below all", member_epoch=-3)
    first.beat("away without an instance", member_epoch=-2)


def consumer_heartbeats(run: Run) -> None:
    first = Consumer(run)
    first.join("joined")
    settle(first)
    first.describe("one member")
    first.beat("nothing new")
    first.beat("an epoch too high", member_epoch=first.epoch + 1)
    first.beat("epoch zero is no heartbeat", member_epoch=0)
    before = first.epoch
    second = Consumer(run)
    second.join("a second one")
    settle(first, second)
    first.describe("two members")
    first.beat("the epoch before", member_epoch=before)
    first.beat("the epoch before, with its partitions", member_epoch=before, topic_partitions=first.owned)
    first.beat("the epoch before, with too many", member_epoch=before, topic_partitions=[0, 1, 2, 3])
    first.beat(
        "everything said",
        rebalance_timeout_ms=REBALANCE_MS,
        subscribed_topic_names=[run.topic],
        topic_partitions=first.owned,
    )
    run.listed("as a consumer group", types_filter=["consumer"])
    run.state("described as classic")
    run.state("described as classic, of old", 5)
    run.commit("commit", generation_id_or_member_epoch=first.epoch, member_id=first.member_id)
    run.commit("commit of old", 8, generation_id_or_member_epoch=first.epoch, member_id=first.member_id)
    run.commit("commit of another epoch", generation_id_or_member_epoch=99, member_id=first.member_id)
    run.commit("commit of a stranger", generation_id_or_member_epoch=first.epoch, member_id="x")
    run.commit("commit from outside")
    run.fetch("fetch", member_id=first.member_id, member_epoch=first.epoch)
    run.fetch("fetch of another epoch", member_id=first.member_id, member_epoch=99)
    run.fetch("fetch of a stranger", member_id="x", member_epoch=1)
    run.fetch("fetch from outside")
    run.forget("a topic that is read")
    run.delete("with members", run.group)
    second.beat("leaves", member_epoch=-1)
    second.beat("after leaving", member_epoch=2)
    settle(first)
    first.describe("alone")
    first.beat("leaves as the last", member_epoch=-1)
    first.describe("empty")
    run.commit("commit into an empty group")
    run.delete("deleted", run.group)


def static_consumers(run: Run) -> None:
    first = Consumer(run, instance_id="i")
    first.join("joined")
    settle(first)
    other = Consumer(run, instance_id="i")
    other.join("the instance is in use")
    other.beat("another's heartbeat", member_epoch=1)
    first.beat("away", member_epoch=-2)
    first.describe("described as away")
    other.join("back as another")
    settle(other)
    other.describe("described as back")
    first.beat("the old one", member_epoch=1)
    other.beat("the new one")
    first.beat("the old one leaves", member_epoch=-1)
    other.beat("the new one leaves", member_epoch=-1)


def from_classic_to_consumer_and_back(run: Run) -> None:
    know_the_topic(run)
    old = run.member()
    old.join()
    old.ask(old.sync_request({old.member_id: assignment(run.topic, 0, 1, 2, 3)}), 5)
    new = Consumer(run)
    new.join("the first of the new protocol")
    new.beat("", subscribed_topic_names=[run.topic])
    while old.beat("") == 0:
        time.sleep(PAUSE_S)
    old.beat("the old one must join again")
    while new.described().group_state != "Stable":
        if old.beat("") == ErrorCode.REBALANCE_IN_PROGRESS:
            old.send_join()
            assert old.read_join() == 0
            old.ask(old.sync_request(), 5)
        new.beat("")
        new.beat("", topic_partitions=new.owned)
    new.describe("settled")
    old.sync("the old one's share")
    old.beat("the old one is up to date")
    old.send_join()
    old.read_join("the old one joins again without need", generation=False)
    old.beat("another generation", generation_id=77)
    old.sync("a sync of another generation", generation_id=77)
    old.sync("a sync with another protocol", protocol_name="other")
    worker = run.member(protocol_type="connect")
    worker.send_join()
    worker.read_join("a worker of something else")
    other = run.member(protocols=[("other", subscription(run.topic))])
    other.send_join()
    other.read_join("no protocol in common")
    run.commit("commit of the old one", generation_id_or_member_epoch=old.generation, member_id=old.member_id)
    run.commit("commit of another generation", generation_id_or_member_epoch=99, member_id=old.member_id)
    new.beat("the new one leaves", member_epoch=-1)
    run.state("a classic group again")
    old.beat("the old one must join once more")
    old.send_join()
    run.note("it joins", old.read_join())
    old.sync("it syncs", {old.member_id: assignment(run.topic, 0, 1, 2, 3)})
    old.leave("it leaves")
    run.state("empty")
    last = Consumer(run)
    last.join("a consumer in the empty classic group")
    last.beat("leaves", member_epoch=-1)
    again = run.member()
    again.send_join()
    again.read_join()
    again.send_join()
    run.note("a classic member in the empty consumer group", again.read_join())


SCRIPTS: Final = (
    joining_a_group,
    a_rebalance,
    syncing_and_beating,
    leaving_a_group,
    static_members,
    offsets,
    forgetting_offsets,
    describing_and_deleting,
    what_no_consumer_says,
    consumer_heartbeats,
    static_consumers,
    from_classic_to_consumer_and_back,
)


@pytest.fixture(scope="module")
def semel_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    process = BrokerProcess(tmp_path_factory.mktemp("groups-like-kafka") / "broker").start()
    try:
        yield process.port
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_requests_get_the_same_answers(
    script: Callable[[Run], None], semel_port: int, kafka_broker: KafkaProcess
) -> None:
    ours, theirs = Run(semel_port), Run(kafka_broker.port)
    script(ours)
    script(theirs)
    assert ours.trace == theirs.trace
