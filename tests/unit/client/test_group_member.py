"""How a leader assigns partitions."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from semel.client.cluster import Cluster
from semel.client.group_member import (
    Claim,
    GroupMember,
    assign,
    decode_assignment,
    decode_claim,
    encode_assignment,
)
from semel.client.metadata import TopicPartition

TOPICS = frozenset({"t"})


def claim(*owned: int, generation_id: int = 1, topics: frozenset[str] = TOPICS) -> Claim:
    return Claim(topics, frozenset(TopicPartition("t", index) for index in owned), generation_id)


def shares(given_out: dict[str, list[TopicPartition]]) -> dict[str, list[int]]:
    return {member: [where.partition for where in partitions] for member, partitions in given_out.items()}


def test_partitions_are_shared_evenly() -> None:
    assert shares(assign({"a": claim(), "b": claim()}, {"t": 5})) == {"a": [0, 2, 4], "b": [1, 3]}


def test_what_a_member_has_stays_with_it() -> None:
    assert shares(assign({"a": claim(3), "b": claim(0, 1)}, {"t": 4})) == {"a": [3, 2], "b": [0, 1]}


def test_a_partition_that_moves_is_free_first() -> None:
    first = assign({"a": claim(0, 1, 2, 3), "b": claim()}, {"t": 4})
    assert shares(first) == {"a": [0, 1], "b": []}
    second = assign({"a": claim(0, 1), "b": claim()}, {"t": 4})
    assert shares(second) == {"a": [0, 1], "b": [2, 3]}


def test_of_two_that_claim_a_partition_the_later_generation_is_right() -> None:
    members = {"a": claim(0, generation_id=3), "b": claim(0, 1, generation_id=4)}
    assert shares(assign(members, {"t": 2})) == {"a": [], "b": [0]}


def test_nobody_gets_what_it_does_not_read() -> None:
    given_out = assign({"a": claim(), "b": claim(topics=frozenset({"u"}))}, {"t": 2, "u": 1})
    assert given_out == {
        "a": [TopicPartition("t", 0), TopicPartition("t", 1)],
        "b": [TopicPartition("u", 0)],
    }


def test_more_members_than_partitions_leaves_some_without() -> None:
    given_out = assign({str(index): claim() for index in range(4)}, {"t": 2})
    assert sorted(len(partitions) for partitions in given_out.values()) == [0, 0, 1, 1]


@given(seed=st.integers(0, 2**32))
def test_members_that_come_and_go_end_with_even_shares_and_no_partition_has_two(seed: int) -> None:
    chosen = random.Random(seed)
    count = chosen.randrange(1, 20)
    owned: dict[str, frozenset[TopicPartition]] = {}
    for generation in range(chosen.randrange(1, 6)):
        members = [name for name in "abcdefg" if chosen.random() < 0.6] or ["a"]
        owned = {member: owned.get(member, frozenset()) for member in members}
        for _ in range(3):
            claims = {member: Claim(TOPICS, mine, generation) for member, mine in owned.items()}
            given_out = assign(claims, {"t": count})
            everything = [where for partitions in given_out.values() for where in partitions]
            assert len(everything) == len(set(everything)), f"seed {seed}"
            for member, partitions in given_out.items():
                others = {where for other, mine in owned.items() if other != member for where in mine}
                assert not others & set(partitions), f"seed {seed}"
            owned = {member: frozenset(partitions) for member, partitions in given_out.items()}
        loads = [len(mine) for mine in owned.values()]
        assert sum(loads) == count, f"seed {seed}"
        assert max(loads) - min(loads) <= 1, f"seed {seed}"


def test_claims_and_assignments_travel() -> None:
    partitions = [TopicPartition("t", 2), TopicPartition("t", 0), TopicPartition("u", 1)]
    assert decode_assignment(encode_assignment(partitions)) == frozenset(partitions)
    assert decode_assignment(b"") == frozenset()
    member = GroupMember(Cluster("localhost:1"), "g", ["t", "u"], "semel")
    told = decode_claim(member._subscription(frozenset(partitions)))
    assert told == Claim(frozenset({"t", "u"}), frozenset(partitions), -1)
