"""Offsets of many partitions: their JSON, the limits of a batch, the ranges of tasks."""

import json
import random

import pytest

from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.spark.source_offsets import OffsetRange, Offsets, batch_end, from_json, parse, split, to_json

A0 = TopicPartition("a", 0)
A2 = TopicPartition("a", 2)
A10 = TopicPartition("a", 10)
B0 = TopicPartition("b", 0)


def test_equal_offsets_are_equal_text_with_partitions_in_the_order_of_their_numbers() -> None:
    one = to_json({B0: 4, A10: 3, A0: 1, A2: 2})
    assert json.dumps(one) == '{"a": {"0": 1, "2": 2, "10": 3}, "b": {"0": 4}}'
    assert json.dumps(to_json({A0: 1, A2: 2, A10: 3, B0: 4})) == json.dumps(one)


def test_json_comes_back_as_it_went() -> None:
    offsets = {A0: 0, A10: 2**62, B0: 7}
    assert from_json(json.loads(json.dumps(to_json(offsets)))) == offsets
    assert parse('{"a": {"0": -2, "2": -1}}') == {A0: -2, A2: -1}


@pytest.mark.parametrize(
    "text", ["soon", "[]", '{"a": 1}', '{"a": {"0": -3}}', '{"a": {"x": 1}}', '{"a": {"0": true}}']
)
def test_what_is_no_offsets_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="earliest, latest, or"):
        parse(text)


def test_a_batch_without_too_much_waiting_goes_to_the_end() -> None:
    assert batch_end({A0: 5}, {A0: 10, B0: 5}, 10) == {A0: 10, B0: 5}


def test_a_limited_batch_gives_every_partition_its_share_and_one_offset_at_least() -> None:
    assert batch_end({A0: 0, A2: 0, B0: 7}, {A0: 9_000, A2: 1_000, B0: 8}, 100) == {A0: 89, A2: 9, B0: 8}


def test_limited_batches_come_to_the_end_and_never_go_back() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(50):
        latest: Offsets = {TopicPartition("t", i): chance.randrange(1_000) for i in range(4)}
        position: Offsets = {where: chance.randrange(end + 1) for where, end in latest.items()}
        most = chance.randrange(1, 300)
        for _ in range(4_000):
            if position == latest:
                break
            ends = batch_end(position, latest, most)
            assert all(position[where] <= ends[where] <= latest[where] for where in latest)
            assert sum(ends[where] - position[where] for where in latest) <= most + len(latest)
            position = ends
        assert position == latest


def test_ranges_are_split_without_gap_or_overlap() -> None:
    ranges = [OffsetRange(A0, 10, 1_000), OffsetRange(B0, 0, 10)]
    pieces = split(ranges, 6)
    assert len(pieces) >= 6
    for whole in ranges:
        own = [piece for piece in pieces if piece.where == whole.where]
        assert [piece.start for piece in own] == [whole.start, *(piece.end for piece in own[:-1])]
        assert own[-1].end == whole.end


def test_ranges_that_are_enough_stay_whole() -> None:
    ranges = [OffsetRange(A0, 0, 10), OffsetRange(B0, 0, 10)]
    assert split(ranges, 2) == ranges
    assert split([OffsetRange(A0, 0, 2)], 5) == [OffsetRange(A0, 0, 1), OffsetRange(A0, 1, 2)]
    assert split([], 4) == []
