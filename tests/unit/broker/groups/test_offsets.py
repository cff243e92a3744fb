"""Offsets: committing, fetching, deleting; those of transactions; expiry."""

from __future__ import annotations

from group_cases import GROUP, Bench, Client, settle

from semel.broker.decision import Decision
from semel.broker.group_messages import (
    GroupPart,
    PartitionOffset,
    TopicOffsets,
    TxnOffsetsEnded,
    TxnOffsetsPending,
)
from semel.broker.groups.group_admin import delete_groups
from semel.broker.groups.offset_commit import offset_commit
from semel.broker.groups.offset_delete import offset_delete
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.groups.registry import Groups
from semel.broker.groups.settings import GroupSettings
from semel.broker.journal_messages import TopicDeleted
from semel.wire.errors import ErrorCode
from semel.wire.messages.delete_groups import DeleteGroupsRequest
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
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)

DAY_MS = 24 * 60 * 60 * 1000


def hold(bench: Bench, topic_id: bytes, offset: int, *, producer_id: int = 7, partition: int = 0) -> None:
    """What a TxnOffsetCommit journals."""
    pending = TxnOffsetsPending(
        group_id=GROUP,
        producer_id=producer_id,
        producer_epoch=0,
        committed_at_ms=bench.now.wall_ms,
        topics=[
            TopicOffsets(
                topic_id=topic_id,
                partitions=[PartitionOffset(index=partition, offset=offset, leader_epoch=-1, metadata="txn")],
            )
        ],
    )
    bench.submit(None, Decision(None, [pending]))


def end(bench: Bench, *, committed: bool, producer_id: int = 7) -> None:
    ended = TxnOffsetsEnded(group_id=GROUP, producer_id=producer_id, committed=committed)
    bench.submit(None, Decision(None, [ended]))


def delete(bench: Bench, topic: str, partition: int = 0) -> tuple[int, int]:
    request = OffsetDeleteRequest(
        group_id=GROUP,
        topics=[
            OffsetDeleteRequestTopic(
                name=topic, partitions=[OffsetDeleteRequestPartition(partition_index=partition)]
            )
        ],
    )
    response = bench.ask(offset_delete, request, 0).reply
    return response.error_code, response.topics[0].partitions[0].error_code if response.topics else 0


# Committing and fetching.


def test_a_simple_consumer_commits_and_fetches() -> None:
    bench = Bench()
    bench.create_topic("events")
    assert bench.commit("events", 42, partition=1, metadata="note") == 0
    found = bench.fetch("events", 1)
    assert (found.committed_offset, found.committed_leader_epoch, found.metadata) == (42, -1, "note")
    assert bench.fetch("events", 0).committed_offset == -1
    assert bench.fetch("events", 0).metadata == ""
    assert bench.fetch("unknown").error_code == 0


def test_offsets_survive_a_restart() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.commit("events", 42)
    bench.restart()
    assert bench.fetch("events").committed_offset == 42


def test_a_member_commits_in_its_generation_only() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench)
    settle(client)
    assert bench.commit("events", 1, member=client) == 0
    client.generation += 1
    assert bench.commit("events", 2, member=client) == ErrorCode.ILLEGAL_GENERATION
    client.generation -= 1
    client.member_id += "x"
    assert bench.commit("events", 2, member=client) == ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.fetch("events").committed_offset == 1


def test_nobody_commits_from_outside_while_the_group_has_members() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench)
    settle(client)
    assert bench.commit("events", 5) == ErrorCode.UNKNOWN_MEMBER_ID
    client.leave()
    assert bench.commit("events", 5) == 0


def test_a_member_commits_while_a_rebalance_is_prepared_but_not_while_it_completes() -> None:
    bench = Bench()
    bench.create_topic("events")
    first, second = Client(bench, "a"), Client(bench, "b")
    settle(first)
    second.join()
    assert bench.commit("events", 3, member=first) == 0
    first.join()
    assert bench.state == "CompletingRebalance"
    assert bench.commit("events", 4, member=first) == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_commit_is_a_sign_of_life() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench)
    settle(client)
    for offset in range(5):
        bench.advance(client.session_ms - 100)
        assert bench.commit("events", offset, member=client) == 0


def test_a_group_that_does_not_exist_has_no_generation() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench)
    client.generation, client.member_id = 1, "x"
    assert bench.commit("events", 1, member=client, version=8) == ErrorCode.ILLEGAL_GENERATION
    assert bench.commit("events", 1, member=client, version=9) == ErrorCode.GROUP_ID_NOT_FOUND
    assert GROUP not in bench.broker.groups.by_id


def test_offsets_of_unknown_partitions_and_with_too_much_metadata_are_refused_one_by_one() -> None:
    bench = Bench()
    bench.create_topic("events", 1)
    assert bench.commit("events", 1, partition=1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert bench.commit("other", 1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert bench.commit("events", 1, metadata="x" * 4097) == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert GROUP not in bench.broker.groups.by_id
    assert bench.commit("events", 1, metadata="x" * 4096) == 0


def test_topics_go_by_id_since_version_10() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    for wanted, error in ((topic_id, 0), (b"?" * 16, ErrorCode.UNKNOWN_TOPIC_ID)):
        part = OffsetCommitRequestPartition(partition_index=0, committed_offset=9, committed_metadata=None)
        request = OffsetCommitRequest(
            group_id=GROUP, topics=[OffsetCommitRequestTopic(topic_id=wanted, partitions=[part])]
        )
        topic = bench.ask(offset_commit, request, 10).reply.topics[0]
        assert (topic.topic_id, topic.partitions[0].error_code) == (wanted, error)
        fetch = OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id=GROUP,
                    topics=[OffsetFetchRequestTopics(topic_id=wanted, partition_indexes=[0])],
                )
            ]
        )
        topic = bench.ask(offset_fetch, fetch, 10).reply.groups[0].topics[0]
        found = topic.partitions[0]
        assert (topic.topic_id, found.error_code) == (wanted, error)
        assert found.committed_offset == (-1 if error else 9)


def test_all_offsets_of_several_groups_are_fetched_at_once() -> None:
    bench = Bench()
    bench.create_topic("a")
    bench.create_topic("b")
    bench.commit("a", 1)
    bench.commit("b", 2, partition=2)
    bench.commit("b", 3, group_id="others")
    request = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(group_id=name, topics=None) for name in (GROUP, "others", "none")]
    )
    groups = bench.ask(offset_fetch, request, 8).reply.groups
    found = {
        (group.group_id, topic.name, part.partition_index): part.committed_offset
        for group in groups
        for topic in group.topics
        for part in topic.partitions
    }
    assert found == {(GROUP, "a", 0): 1, (GROUP, "b", 2): 2, ("others", "b", 0): 3}
    assert [group.error_code for group in groups] == [0, 0, 0]


def test_old_versions_fetch_one_group() -> None:
    bench = Bench()
    bench.create_topic("a")
    bench.commit("a", 1)
    for version in range(1, 8):
        wanted = [OffsetFetchRequestTopic(name="a", partition_indexes=[0, 1])]
        response = bench.ask(offset_fetch, OffsetFetchRequest(group_id=GROUP, topics=wanted), version).reply
        assert [part.committed_offset for part in response.topics[0].partitions] == [1, -1]
        if version >= 2:
            response = bench.ask(offset_fetch, OffsetFetchRequest(group_id=GROUP, topics=None), version).reply
            assert [part.committed_offset for part in response.topics[0].partitions] == [1]


def test_a_new_topic_does_not_inherit_the_offsets_of_a_deleted_one() -> None:
    bench = Bench(GroupSettings(retention_check_interval_ms=1_000))
    topic_id = bench.create_topic("events")
    bench.create_topic("kept")
    bench.commit("events", 42)
    bench.commit("kept", 1)
    bench.submit(None, Decision(None, [TopicDeleted(topic_id=topic_id)]))
    bench.create_topic("events")
    assert bench.fetch("events").committed_offset == -1
    everything = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=GROUP, topics=None)])
    topics = bench.ask(offset_fetch, everything, 8).reply.groups[0].topics
    assert [topic.name for topic in topics] == ["kept"]
    bench.advance(2_000)
    assert topic_id not in bench.group.offsets.committed
    assert bench.fetch("kept").committed_offset == 1


# Deleting.


def test_offsets_are_deleted_on_request() -> None:
    bench = Bench()
    bench.create_topic("events")
    assert delete(bench, "events") == (ErrorCode.GROUP_ID_NOT_FOUND, 0)
    bench.commit("events", 42)
    assert delete(bench, "none") == (0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert delete(bench, "events", 9) == (0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert delete(bench, "events", 1) == (0, 0)
    assert delete(bench, "events") == (0, 0)
    assert bench.fetch("events").committed_offset == -1


def test_offsets_of_topics_that_members_read_stay() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.create_topic("old")
    bench.commit("events", 1)
    bench.commit("old", 1)
    settle(Client(bench))
    assert delete(bench, "events") == (0, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC)
    assert delete(bench, "old") == (0, 0)


def test_a_group_of_another_kind_must_be_empty_for_that() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench)
    client.protocol_type = "connect"
    settle(client)
    assert delete(bench, "events") == (ErrorCode.NON_EMPTY_GROUP, 0)


# Transactions.


def test_an_offset_in_a_transaction_is_unstable_until_it_commits() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    bench.commit("events", 1)
    hold(bench, topic_id, 5)
    assert bench.fetch("events").committed_offset == 1
    unstable = bench.fetch("events", stable=True)
    assert (unstable.error_code, unstable.committed_offset) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert bench.fetch("events", 1, stable=True).error_code == 0
    end(bench, committed=True)
    found = bench.fetch("events", stable=True)
    assert (found.error_code, found.committed_offset, found.metadata) == (0, 5, "txn")


def test_an_aborted_transaction_leaves_the_offset_as_it_was() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    bench.commit("events", 1)
    hold(bench, topic_id, 5)
    end(bench, committed=False)
    assert bench.fetch("events", stable=True).committed_offset == 1


def test_the_later_write_wins_over_the_later_end() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    hold(bench, topic_id, 5)
    bench.commit("events", 9)
    end(bench, committed=True)
    assert bench.fetch("events").committed_offset == 9
    bench.commit("events", 10)
    hold(bench, topic_id, 7)
    end(bench, committed=True)
    assert bench.fetch("events").committed_offset == 7


def test_of_two_transactions_the_later_write_wins_whoever_commits_first() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    hold(bench, topic_id, 1, producer_id=1)
    hold(bench, topic_id, 2, producer_id=2)
    end(bench, committed=True, producer_id=2)
    assert bench.fetch("events", stable=True).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    end(bench, committed=True, producer_id=1)
    assert bench.fetch("events", stable=True).committed_offset == 2


def test_pending_offsets_and_their_order_survive_restart_and_snapshot() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    bench.commit("events", 1, partition=1)
    hold(bench, topic_id, 5)
    bench.commit("events", 9)
    hold(bench, topic_id, 6, partition=1)
    bench.restart()
    out = bytearray()
    bench.group.part().encode(out, 0, [])
    part, _ = GroupPart.decode(memoryview(out), 0, 0)
    bench.broker.groups = Groups(bench.settings)
    bench.broker.groups.load(part)
    assert bench.fetch("events", stable=True).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert bench.fetch("events").committed_offset == 9
    bench.commit("events", 8, partition=1)
    end(bench, committed=True)
    assert bench.fetch("events", stable=True).committed_offset == 9
    assert bench.fetch("events", 1, stable=True).committed_offset == 8, "it was written after the snapshot"


def test_a_deleted_offset_does_not_come_back_with_a_commit() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    hold(bench, topic_id, 5)
    hold(bench, topic_id, 6, partition=1)
    assert delete(bench, "events") == (0, 0)
    assert bench.fetch("events", stable=True).error_code == 0
    end(bench, committed=True)
    assert bench.fetch("events").committed_offset == -1
    assert bench.fetch("events", 1).committed_offset == 6
    hold(bench, topic_id, 7, producer_id=8)
    assert delete(bench, "events") == (0, 0)
    assert not bench.group.offsets.pending, "a transaction that holds nothing does not keep the group"


def test_the_end_of_a_transaction_without_offsets_here_is_nothing() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.commit("events", 1)
    end(bench, committed=True)
    assert bench.fetch("events", stable=True).committed_offset == 1


def test_a_transaction_of_a_member_is_checked_against_the_group() -> None:
    bench = Bench()
    groups = bench.broker.groups
    assert groups.refuses_txn_commit(GROUP, "", -1, None) is None
    assert groups.refuses_txn_commit(GROUP, "a", 1, None) == ErrorCode.ILLEGAL_GENERATION
    client = Client(bench, instance_id="i")
    settle(client)
    member, generation = client.member_id, client.generation
    assert groups.refuses_txn_commit(GROUP, member, generation, "i") is None
    assert groups.refuses_txn_commit(GROUP, member, generation - 1, "i") == ErrorCode.ILLEGAL_GENERATION
    assert groups.refuses_txn_commit(GROUP, "other", generation, None) == ErrorCode.UNKNOWN_MEMBER_ID
    assert groups.refuses_txn_commit(GROUP, "other", generation, "i") == ErrorCode.FENCED_INSTANCE_ID
    assert groups.refuses_txn_commit(GROUP, "", -1, None) is None, "producers of old carry no generation"


# Expiry.


def test_offsets_of_a_simple_group_expire_and_the_group_with_the_last_of_them() -> None:
    bench = Bench()
    bench.create_topic("events")
    bench.commit("events", 1)
    bench.advance(DAY_MS, step_ms=600_000)
    bench.commit("events", 2, partition=1)
    bench.advance(6 * DAY_MS + 600_000, step_ms=600_000)
    assert bench.fetch("events").committed_offset == -1
    assert bench.fetch("events", 1).committed_offset == 2
    bench.advance(DAY_MS, step_ms=600_000)
    assert GROUP not in bench.broker.groups.by_id
    bench.restart()
    assert GROUP not in bench.broker.groups.by_id


def test_offsets_of_a_group_with_members_never_expire() -> None:
    bench = Bench()
    bench.create_topic("events")
    client = Client(bench, session_ms=1_800_000)
    settle(client)
    bench.commit("events", 1, member=client)
    for _ in range(8 * 96):
        bench.advance(900_000, step_ms=900_000)
        assert client.beat() == 0
    assert bench.fetch("events").committed_offset == 1
    client.leave()
    bench.advance(6 * DAY_MS, step_ms=600_000)
    assert bench.fetch("events").committed_offset == 1
    bench.advance(DAY_MS + 600_000, step_ms=600_000)
    assert GROUP not in bench.broker.groups.by_id


def test_a_client_of_old_names_its_own_retention() -> None:
    bench = Bench()
    bench.create_topic("events")
    assert bench.commit("events", 1, version=4, retention_ms=DAY_MS) == 0
    bench.advance(DAY_MS - 600_000, step_ms=600_000)
    assert bench.fetch("events").committed_offset == 1
    bench.advance(2 * 600_000, step_ms=600_000)
    assert GROUP not in bench.broker.groups.by_id


def test_a_group_with_pending_offsets_neither_expires_nor_is_deleted() -> None:
    bench = Bench()
    topic_id = bench.create_topic("events")
    bench.commit("events", 1)
    hold(bench, topic_id, 5)
    bench.advance(9 * DAY_MS, step_ms=600_000)
    assert bench.fetch("events").committed_offset == 1
    deleted = bench.ask(delete_groups, DeleteGroupsRequest(groups_names=[GROUP]), 2).reply.results[0]
    assert deleted.error_code == ErrorCode.NON_EMPTY_GROUP
    end(bench, committed=True)
    assert bench.fetch("events").committed_offset == 5
    deleted = bench.ask(delete_groups, DeleteGroupsRequest(groups_names=[GROUP]), 2).reply.results[0]
    assert deleted.error_code == 0
