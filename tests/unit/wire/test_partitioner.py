"""Keys go where every other client puts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from semel.wire.columns import BinaryColumn
from semel.wire.partitioner import (
    MAX_COLUMN_KEY_BYTES,
    NO_PARTITION,
    murmur2,
    murmur2_column,
    partition_column,
    partition_for_key,
)


@pytest.mark.parametrize(
    ("key", "java_hash"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hashes_are_those_that_java_computes(key: bytes, java_hash: int) -> None:
    assert murmur2(key) == java_hash & 0xFFFFFFFF
    assert murmur2_column(BinaryColumn.of([key])).tolist() == [java_hash & 0xFFFFFFFF]


@given(st.binary(max_size=300))
def test_hashes_are_those_of_kafka_python(key: bytes) -> None:
    assert murmur2(key) == kafka_python_murmur2(key) & 0xFFFFFFFF


@given(st.lists(st.binary(max_size=40) | st.binary(min_size=250, max_size=270), max_size=50))
def test_a_column_is_hashed_like_its_keys(keys: list[bytes]) -> None:
    assert murmur2_column(BinaryColumn.of(keys)).tolist() == [murmur2(key) for key in keys]


@given(st.integers(0, 20).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1)))
def test_keys_of_one_length_are_hashed_like_any_other(keys: list[bytes]) -> None:
    assert murmur2_column(BinaryColumn.of(keys)).tolist() == [murmur2(key) for key in keys]


def test_very_long_keys_do_not_hold_up_a_column() -> None:
    keys = [b"short", bytes(100_000), b"x" * (MAX_COLUMN_KEY_BYTES + 1), b"", b"y" * MAX_COLUMN_KEY_BYTES]
    assert murmur2_column(BinaryColumn.of(keys)).tolist() == [murmur2(key) for key in keys]


@given(st.lists(st.none() | st.binary(max_size=20), max_size=50), st.integers(1, 1_000))
def test_partitions_of_a_column_are_those_of_its_keys_and_nulls_have_none(
    keys: list[bytes | None], count: int
) -> None:
    expected = [NO_PARTITION if key is None else partition_for_key(key, count) for key in keys]
    assert partition_column(BinaryColumn.of(keys), count).tolist() == expected
    assert all(0 <= partition < count for partition in expected if partition != NO_PARTITION)


def test_a_slice_of_a_larger_buffer_is_hashed_in_its_own_bounds() -> None:
    column = BinaryColumn(b"??abcfoobar", np.array([2, 5, 11], np.int32))
    assert murmur2_column(column).tolist() == [murmur2(b"abc"), murmur2(b"foobar")]


def test_hashing_leaves_the_column_as_it_was() -> None:
    column = BinaryColumn.of([b"k" * 300, b"a"])
    murmur2_column(column)
    assert column.lengths().tolist() == [300, 1]
