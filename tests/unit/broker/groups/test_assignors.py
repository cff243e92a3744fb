"""Assignors: everything is given, nothing twice, evenly, and little moves."""

from __future__ import annotations

import random
import time

from semel.broker.groups.assignors import (
    Assignment,
    Partitions,
    TopicPartition,
    assign_ranges,
    assign_uniformly,
)

A, B, C = (name * 16 for name in (b"a", b"b", b"c"))


def all_of(subscriptions: dict[str, frozenset[bytes]], counts: dict[bytes, int]) -> set[TopicPartition]:
    topics = {topic for subscribed in subscriptions.values() for topic in subscribed if topic in counts}
    return {(topic, index) for topic in topics for index in range(counts[topic])}


def check(
    assignment: Assignment, subscriptions: dict[str, frozenset[bytes]], counts: dict[bytes, int]
) -> None:
    assert set(assignment) == set(subscriptions)
    given = [partition for partitions in assignment.values() for partition in partitions]
    assert len(given) == len(set(given)), "twice"
    assert set(given) == all_of(subscriptions, counts)
    for member, partitions in assignment.items():
        assert {topic for topic, _ in partitions} <= subscriptions[member]


def is_even(assignment: Assignment, subscriptions: dict[str, frozenset[bytes]]) -> bool:
    """No partition could go to somebody who has at least two fewer."""
    return not any(
        len(partitions) - len(assignment[other]) >= 2
        for owner, partitions in assignment.items()
        for topic, _ in partitions
        for other in assignment
        if topic in subscriptions[other]
    )


def test_partitions_are_spread_evenly() -> None:
    everybody = {name: frozenset({A, B}) for name in ("m1", "m2", "m3")}
    assignment = assign_uniformly(everybody, {A: 5, B: 2}, {})
    assert sorted(len(partitions) for partitions in assignment.values()) == [2, 2, 3]


def test_a_newcomer_gets_its_share_and_nothing_else_moves() -> None:
    counts = {A: 100}
    before: dict[str, Partitions] = {}
    members: dict[str, frozenset[bytes]] = {}
    for number in range(1, 11):
        members[f"m{number:02}"] = frozenset({A})
        after = assign_uniformly(members, counts, before)
        moved = sum(len(after[name] - before[name]) for name in before)
        assert moved == 0
        before = after
    assert {len(partitions) for partitions in before.values()} == {10}


def test_what_a_leaver_had_is_spread_and_nothing_else_moves() -> None:
    members = {f"m{number}": frozenset({A}) for number in range(4)}
    before = assign_uniformly(members, {A: 12}, {})
    del members["m2"]
    after = assign_uniformly(members, {A: 12}, before)
    assert all(before[name] <= after[name] for name in members)
    assert {len(partitions) for partitions in after.values()} == {4}


def test_topics_that_are_gone_or_unknown_are_left_out() -> None:
    members = {"m1": frozenset({A, C}), "m2": frozenset({C})}
    before = {"m1": frozenset({(A, 0), (A, 7), (B, 0)}), "m2": frozenset({(A, 1)})}
    assert assign_uniformly(members, {A: 2, B: 1}, before) == {
        "m1": frozenset({(A, 0), (A, 1)}),
        "m2": frozenset(),
    }


def test_a_partition_that_two_claim_is_given_to_one() -> None:
    members = {"m1": frozenset({A}), "m2": frozenset({A})}
    both = frozenset({(A, 0), (A, 1)})
    assignment = assign_uniformly(members, {A: 2}, {"m1": both, "m2": both})
    assert {len(partitions) for partitions in assignment.values()} == {1}


def test_ranges_give_the_same_numbers_of_every_topic() -> None:
    members = {name: frozenset({A, B}) for name in ("m3", "m1", "m2")}
    assignment = assign_ranges(members, {A: 7, B: 7}, {})
    for topic in (A, B):
        assert [
            sorted(index for of, index in assignment[name] if of == topic) for name in ("m1", "m2", "m3")
        ] == [
            [0, 1, 2],
            [3, 4],
            [5, 6],
        ]


def test_any_group_is_served_evenly_and_moves_settle() -> None:
    for seed in range(300):
        dice = random.Random(seed)
        topics = [bytes([number]) * 16 for number in range(dice.randint(1, 6))]
        counts = {topic: dice.randint(1, 9) for topic in topics if dice.random() < 0.9}
        before: Assignment = {}
        members: dict[str, frozenset[bytes]] = {}
        for _ in range(6):
            name = f"m{dice.randint(0, 6)}"
            if name in members and dice.random() < 0.5:
                del members[name]
            else:
                members[name] = frozenset(dice.sample(topics, dice.randint(1, len(topics))))
            after = assign_uniformly(members, counts, before)
            check(after, members, counts)
            assert is_even(after, members), f"seed {seed}"
            assert assign_uniformly(members, counts, after) == after, f"seed {seed}: moves without need"
            check(assign_ranges(members, counts, before), members, counts)
            before = after


def test_a_large_group_is_assigned_in_no_time() -> None:
    members = {f"m{number}": frozenset({A, B}) for number in range(1_000)}
    counts = {A: 5_000, B: 5_000}
    begun = time.process_time()
    before = assign_uniformly(members, counts, {})
    members["newcomer"] = frozenset({A, B})
    after = assign_uniformly(members, counts, before)
    spent_s = time.process_time() - begun
    assert len(after["newcomer"]) == 9
    assert spent_s < 2.0, f"{spent_s:.2f} s"
