"""Consumer groups with stock clients: joining and leaving, static members, offsets, restarts."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupType,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from group_members import MEMBERS, ConfluentMember, GroupMember, share_all, wait_until

from semel.embedded import Broker

PARTITIONS = 6
RECORDS = 600


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker(settings={"group.consumer.heartbeat.interval.ms": 200}) as broker:
        yield broker.bootstrap


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


def create(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS)])[topic].result()


def fill(bootstrap: str, topic: str, records: int = RECORDS) -> None:
    """Spread records over the partitions."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for number in range(records):
        producer.produce(topic, value=str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(20) == 0


def committed(bootstrap: str, group: str, topic: str) -> list[int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    parts = consumer.committed([TopicPartition(topic, index) for index in range(PARTITIONS)], timeout=10)
    consumer.close()
    return [part.offset for part in parts]


def read_all(*members: GroupMember, records: int = RECORDS) -> None:
    """Wait until these members have read everything, and nothing twice."""
    wait_until("all is read", lambda: sum(len(one.received) for one in members) >= records, *members)
    assert len({record for one in members for record in one.received}) == records
    assert sum(len(one.received) for one in members) == records


def close_all(*members: GroupMember) -> None:
    for member in members:
        member.close()


@pytest.mark.parametrize("library", MEMBERS)
def test_three_members_share_a_topic_and_take_over_when_one_leaves(
    bootstrap: str, group: str, topic: str, library: str
) -> None:
    create(bootstrap, topic)
    first, second, third = (MEMBERS[library](bootstrap, group, topic).start() for _ in range(3))
    everybody = (first, second, third)
    wait_until("three share", lambda: share_all(PARTITIONS, *everybody), *everybody)
    assert [len(member.assignment) for member in everybody] == [2, 2, 2]
    fill(bootstrap, topic)
    read_all(*everybody)
    for member in everybody:
        member.commit()
    assert committed(bootstrap, group, topic) == [RECORDS // PARTITIONS] * PARTITIONS
    first.close()
    wait_until("two share", lambda: share_all(PARTITIONS, second, third), second, third)
    close_all(second, third)
    fill(bootstrap, topic, PARTITIONS)
    later = MEMBERS[library](bootstrap, group, topic).start()
    wait_until("what is new is read", lambda: len(later.received) >= PARTITIONS, later)
    assert sorted(later.received) == [(index, RECORDS // PARTITIONS) for index in range(PARTITIONS)]
    later.close()


def test_clients_of_three_libraries_share_one_group(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    everybody = tuple(member(bootstrap, group, topic).start() for member in MEMBERS.values())
    wait_until("all share", lambda: share_all(PARTITIONS, *everybody), *everybody)
    fill(bootstrap, topic)
    read_all(*everybody)
    close_all(*everybody)


def test_cooperative_members_keep_what_they_can(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    first = ConfluentMember(bootstrap, group, topic, sticky=True).start()
    wait_until("one has all", lambda: share_all(PARTITIONS, first), first)
    second = ConfluentMember(bootstrap, group, topic, sticky=True).start()
    wait_until("two share", lambda: share_all(PARTITIONS, first, second), first, second)
    kept = first.assignment
    third = ConfluentMember(bootstrap, group, topic, sticky=True).start()
    wait_until("three share", lambda: share_all(PARTITIONS, first, second, third), first, second, third)
    assert first.assignment < kept
    close_all(first, second, third)


@pytest.mark.parametrize("library", MEMBERS)
def test_a_static_member_comes_back_without_a_rebalance(
    bootstrap: str, group: str, topic: str, library: str
) -> None:
    create(bootstrap, topic)
    member = MEMBERS[library]
    stays = member(bootstrap, group, topic, instance_id="stays").start()
    goes = member(bootstrap, group, topic, instance_id="goes").start()
    wait_until("two share", lambda: share_all(PARTITIONS, stays, goes), stays, goes)
    share, rebalances = goes.assignment, stays.rebalances
    goes.close()
    back = member(bootstrap, group, topic, instance_id="goes").start()
    wait_until("the share is back", lambda: back.assignment == share, stays, back)
    assert stays.rebalances == rebalances
    close_all(stays, back)


def test_tools_list_describe_and_delete_groups(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    member = ConfluentMember(bootstrap, group, topic).start()
    wait_until("one has all", lambda: share_all(PARTITIONS, member), member)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    described = admin.describe_consumer_groups([group])[group].result()
    assert described.state == ConsumerGroupState.STABLE
    assert described.partition_assignor == "range"
    (listed,) = described.members
    assert {part.partition for part in listed.assignment.topic_partitions} == set(range(PARTITIONS))
    with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
        admin.delete_consumer_groups([group])[group].result()
    states = {one.group_id: one.state for one in admin.list_consumer_groups().result().valid}
    assert states[group] == ConsumerGroupState.STABLE
    fill(bootstrap, topic, PARTITIONS)
    read_all(member, records=PARTITIONS)
    member.commit()
    member.close()
    states = {
        one.group_id: one.state
        for one in admin.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result().valid
    }
    assert states[group] == ConsumerGroupState.EMPTY
    admin.delete_consumer_groups([group])[group].result()
    assert committed(bootstrap, group, topic) == [-1001] * PARTITIONS


def test_offsets_and_members_survive_a_restart(tmp_path: Path, group: str, topic: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {"listeners": address}
    with Broker(tmp_path, settings=settings):
        create(address, topic)
        first, second = (ConfluentMember(address, group, topic).start() for _ in range(2))
        wait_until("two share", lambda: share_all(PARTITIONS, first, second), first, second)
        fill(address, topic)
        read_all(first, second)
        first.commit()
        second.commit()
        rebalances = first.rebalances, second.rebalances
        before = members_of(address, group)
    with Broker(tmp_path, settings=settings):
        fill(address, topic, PARTITIONS)
        read_all(first, second, records=RECORDS + PARTITIONS)
        assert members_of(address, group) == before
        assert (first.rebalances, second.rebalances) == rebalances
        assert committed(address, group, topic) == [RECORDS // PARTITIONS] * PARTITIONS
        close_all(first, second)


def by_broker(bootstrap: str, group: str, topic: str, instance_id: str | None = None) -> ConfluentMember:
    member = ConfluentMember(bootstrap, group, topic, instance_id=instance_id, assigned_by_broker=True)
    member.start()
    return member


def test_members_of_the_consumer_protocol_share_a_topic(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    first, second, third = (by_broker(bootstrap, group, topic) for _ in range(3))
    everybody = (first, second, third)
    wait_until("three share", lambda: share_all(PARTITIONS, *everybody), *everybody)
    assert [len(member.assignment) for member in everybody] == [2, 2, 2]
    fill(bootstrap, topic)
    read_all(*everybody)
    for member in everybody:
        member.commit()
    assert committed(bootstrap, group, topic) == [RECORDS // PARTITIONS] * PARTITIONS
    first.close()
    wait_until("two share", lambda: share_all(PARTITIONS, second, third), second, third)
    close_all(second, third)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    kinds = {one.group_id: one.type for one in admin.list_consumer_groups().result().valid}
    assert kinds[group] == ConsumerGroupType.CONSUMER


def test_a_pattern_subscribes_to_topics_that_come_later(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, f"{topic}-one")
    member = by_broker(bootstrap, group, f"^{topic}-.*")
    wait_until("one topic is assigned", lambda: len(member.assignment) == PARTITIONS, member)
    create(bootstrap, f"{topic}-two")
    fill(bootstrap, f"{topic}-one", PARTITIONS)
    fill(bootstrap, f"{topic}-two", PARTITIONS)
    wait_until("both topics are read", lambda: len(member.received) == 2 * PARTITIONS, member)
    member.close()


def test_an_application_moves_to_the_consumer_protocol_and_back_without_a_pause(
    bootstrap: str, group: str, topic: str
) -> None:
    create(bootstrap, topic)
    classic = [ConfluentMember(bootstrap, group, topic, sticky=True).start() for _ in range(2)]
    wait_until("two share", lambda: share_all(PARTITIONS, *classic), *classic)
    new = [by_broker(bootstrap, group, topic) for _ in range(2)]
    wait_until("four share", lambda: share_all(PARTITIONS, *classic, *new), *classic, *new)
    close_all(*classic)
    wait_until("the new ones share", lambda: share_all(PARTITIONS, *new), *new)
    old = [ConfluentMember(bootstrap, group, topic, sticky=True).start() for _ in range(2)]
    wait_until("four share again", lambda: share_all(PARTITIONS, *new, *old), *new, *old)
    close_all(*new)
    wait_until("the old ones share", lambda: share_all(PARTITIONS, *old), *old)
    fill(bootstrap, topic)
    read_all(*old)
    close_all(*old)


def members_of(bootstrap: str, group: str) -> set[str]:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    described = admin.describe_consumer_groups([group])[group].result()
    assert described.state == ConsumerGroupState.STABLE
    return {member.member_id for member in described.members}
