"""From Arrow columns to records."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.sinks.errors import WriteFailed
from semel.sinks.kafka.bad_rows import BadRows, DeadLetters, find_oversize, show_key
from semel.sinks.kafka.rows import (
    RecordLayout,
    as_batches,
    binary_column,
    column,
    order_by_partition,
    read_headers,
    read_partitions,
    read_rows,
    read_timestamps,
    read_topics,
)
from semel.wire.columns import BinaryColumn, build_batches
from semel.wire.partitioner import NO_PARTITION, partition_column, partition_for_key

STRINGS = ["", "a", None, "bcd", "é", None, "x" * 100]
BYTES = [None if text is None else text.encode() for text in STRINGS]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(STRINGS, pa.string()),
        pa.array(STRINGS, pa.large_string()),
        pa.array(BYTES, pa.binary()),
        pa.array(BYTES, pa.large_binary()),
        pa.array(STRINGS, pa.string_view()),
        pa.array(BYTES, pa.binary_view()),
        pa.array(STRINGS, pa.string()).dictionary_encode(),
    ],
    ids=str,
)
@pytest.mark.parametrize("bounds", [(0, 7), (1, 6), (3, 3), (5, 7)])
def test_every_kind_of_string_is_read_where_it_lies(array: pa.Array, bounds: tuple[int, int]) -> None:
    start, stop = bounds
    if isinstance(array, pa.DictionaryArray):
        assert array.type != pa.string()
    assert binary_column(array.slice(start, stop - start), "c").to_list() == BYTES[start:stop]


def test_other_columns_of_bytes_are_read_too() -> None:
    fixed = pa.array([b"abcd", None, b"efgh"], pa.binary(4))
    assert binary_column(fixed, "c").to_list() == [b"abcd", None, b"efgh"]
    assert binary_column(pa.nulls(3), "c").to_list() == [None, None, None]
    assert binary_column(pa.array([], pa.string()), "c").to_list() == []
    assert binary_column(pa.array(["", ""]), "c").to_list() == [b"", b""]


@pytest.mark.parametrize("array", [pa.array([1]), pa.array([1.5]), pa.array([[b"a"]]), pa.array([{"a": 1}])])
def test_a_column_that_is_no_bytes_is_named(array: pa.Array) -> None:
    with pytest.raises(
        WriteFailed, match=r"column 'key' is of type .*: cast it to string or binary"
    ) as failure:
        binary_column(array, "key")
    assert failure.value.is_permanent


def test_rows_of_all_forms_become_batches() -> None:
    table = pa.table({"value": pa.chunked_array([[b"a"], [b"b", b"c"]])})
    assert [batch.num_rows for batch in as_batches(table)] == [1, 2]
    (batch,) = as_batches([{"value": b"a"}, {"value": None}])
    assert batch.to_pylist() == [{"value": b"a"}, {"value": None}]
    assert as_batches([]) == []
    with pytest.raises(WriteFailed, match="one type"):
        as_batches([{"value": b"a"}, {"value": 1}])


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    batch = pa.record_batch({"a": [1], "b": [2]})
    with pytest.raises(WriteFailed, match="no column 'key' for the record's key; the rows have a, b"):
        column(batch, "key", "key")


def test_timestamps_are_milliseconds_whatever_their_unit() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    wanted = int(moment.timestamp() * 1000)
    for kind in (pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("us"), pa.timestamp("ns", "CET")):
        assert read_timestamps(pa.array([moment], kind), "t").tolist() == [wanted]
    assert read_timestamps(pa.array([7], pa.int32()), "t").tolist() == [7]
    assert read_timestamps(pa.array([1_999], pa.timestamp("us")), "t").tolist() == [1]
    now, given = read_timestamps(pa.array([None, 7], pa.int64()), "t").tolist()
    assert (now > 1_600_000_000_000, given) == (True, 7)
    with pytest.raises(WriteFailed, match="timestamps are timestamps"):
        read_timestamps(pa.array(["now"]), "t")


def test_partitions_and_topics_are_read_with_their_nulls() -> None:
    assert read_partitions(pa.array([3, None], pa.int16()), "p", -1).tolist() == [3, -1]
    with pytest.raises(WriteFailed, match="partitions are integers"):
        read_partitions(pa.array(["3"]), "p", -1)
    topics, codes = read_topics(pa.array(["a", None, "b", "a"], pa.large_string()), "t")
    assert [topics[code] for code in codes.tolist()] == ["a", None, "b", "a"]
    with pytest.raises(WriteFailed, match="topics are strings"):
        read_topics(pa.array([1]), "t")


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        pa.map_(pa.string(), pa.binary()),
    ],
    ids=["list", "map"],
)
def test_headers_are_lists_of_pairs_or_maps(kind: pa.DataType) -> None:
    array = pa.array([[("a", b"1"), ("b", None)], [], None], kind)
    assert [list(of_row) for of_row in read_headers(array, "h")] == [[("a", b"1"), ("b", None)], [], []]


@pytest.mark.parametrize(
    "wrong",
    [
        pa.array([["a"]]),
        pa.array([[1]]),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([[{"name": "a"}]]),
    ],
)
def test_headers_of_another_shape_are_refused(wrong: pa.Array) -> None:
    with pytest.raises(WriteFailed, match="should hold lists of"):
        read_headers(wrong, "h")


def test_keys_of_a_column_go_where_single_keys_go() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    keys = [None if dice.random() < 0.1 else dice.randbytes(dice.randrange(300)) for _ in range(2_000)]
    for array in (pa.array(keys), pa.array([b"", *keys]).slice(1), pa.array(keys, pa.large_binary())):
        wanted = [NO_PARTITION if key is None else partition_for_key(key, 7) for key in keys]
        assert partition_column(binary_column(array, "key"), 7).tolist() == wanted


@pytest.mark.parametrize("last", [2, 2**15 - 1, 2**15, 2**16])
def test_rows_are_grouped_by_partition_in_their_order(last: int) -> None:
    order, runs = order_by_partition(np.array([last, 0, last, 1, 0]))
    assert order is not None
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert runs == [(0, 0, 2), (1, 2, 3), (last, 3, 5)]


def test_rows_that_lie_well_are_left_where_they_are() -> None:
    assert order_by_partition(np.array([0, 0, 3])) == (None, [(0, 0, 2), (3, 2, 3)])
    assert order_by_partition(np.array([], np.int64)) == (None, [])


def test_a_slice_of_rows_is_the_rows_of_a_slice() -> None:
    batch = pa.record_batch({"key": BYTES, "value": STRINGS, "h": [[("n", b"%d" % i)] for i in range(7)]})
    rows = read_rows(batch, RecordLayout(headers=None)).slice(2, 5)
    assert rows.values.to_list() == BYTES[2:5]
    assert rows.keys is not None
    assert rows.keys.to_list() == BYTES[2:5]
    assert len(rows.timestamps) == 3


# Bad rows


def rows_of(values: list[bytes | None], keys: list[bytes | None] | None = None) -> Any:
    batch = pa.record_batch({"value": values, "key": keys or [b"k"] * len(values)})
    return read_rows(batch, RecordLayout())


def test_a_row_is_oversize_exactly_where_no_batch_holds_it() -> None:
    for size in range(1_800, 1_960):
        rows = rows_of([b"x" * size])
        bad = BadRows()
        find_oversize(rows, 2_000, bad)
        fits = len(build_batches(rows.values, rows.keys, 0, max_batch_bytes=10_000)[0]) <= 2_000
        assert (len(bad) == 0) == fits, size


def test_the_first_bad_row_is_named_and_the_others_counted() -> None:
    rows = rows_of([b"a", b"x" * 3_000, b"b", b"y" * 3_000], [b"k0", b"\xffk1", None, b"k" * 100])
    bad = BadRows()
    find_oversize(rows, 2_000, bad)
    assert bad.indexes == [1, 3]
    assert bad.good(4).tolist() == [0, 2]
    message = str(bad.fail(rows, np.arange(10, 14), "topic"))
    assert message.startswith(
        r"row 11 (key '\\xffk1') cannot be written to topic 'topic': as a record it takes 30"
    )
    assert message.endswith("(1 more rows are bad)")
    assert show_key(rows.keys, 2) == "none"
    assert len(show_key(rows.keys, 3)) < 70


def test_dead_letters_keep_what_fits_and_say_why() -> None:
    rows = rows_of([b"a", b"x" * 9_000, None], [b"k0", b"k1", None])
    bad = BadRows()
    for index in range(3):
        bad.add(index, f"reason {index}")
    letters = DeadLetters(bad, rows, np.arange(5, 8), [("semel.sink", b"s")], 4_000)
    values, keys = letters.columns()
    assert values.to_list() == [b"a", None, None]
    assert keys.to_list() == [b"k0", b"k1", None]
    assert dict(letters.headers[0]) == {"semel.reason": b"reason 0", "semel.row": b"5", "semel.sink": b"s"}
    assert dict(letters.headers[1])["semel.value.bytes"] == b"9000"
    assert build_batches(values, keys, 0, letters.headers, max_batch_bytes=4_000)


def test_a_column_without_rows_has_no_oversize_row() -> None:
    rows = read_rows(
        pa.record_batch({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())}),
        RecordLayout(),
    )
    bad = BadRows()
    find_oversize(rows, 100, bad)
    assert len(bad) == 0
    assert isinstance(rows.values, BinaryColumn)
