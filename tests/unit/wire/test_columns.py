"""Columns make the same bytes as records do, and come back the same."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.wire.batch import InvalidBatch, check_batch, read_header, stamp_append_time, write_crc
from semel.wire.columns import (
    MAX_RUN_RECORDS,
    BinaryColumn,
    RecordColumns,
    build_batches,
    read_columns,
    read_columns_of,
    valid_from_bitmap,
)
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.records import (
    Record,
    build_batch,
    encode_varint,
    read_records,
    rebuild_batch,
    scan_records,
    unpack_body,
)

contents = st.none() | st.binary(max_size=100)
headers = st.lists(st.tuples(st.text(max_size=5), contents), max_size=2)
records_of = st.lists(st.builds(Record, contents, contents, st.integers(-1, 2**50)), min_size=1, max_size=80)
records_with_headers = st.lists(
    st.builds(Record, contents, contents, st.integers(0, 2**40), headers), min_size=1, max_size=20
)


def columns_of(records: list[Record]) -> tuple[BinaryColumn, BinaryColumn, np.ndarray]:
    values = BinaryColumn.of([record.value for record in records])
    keys = BinaryColumn.of([record.key for record in records])
    return values, keys, np.array([record.timestamp for record in records], np.int64)


def records_in(columns: RecordColumns) -> list[Record]:
    of_records = columns.headers or [()] * len(columns.offsets)
    return [
        Record(key, value, timestamp, of_record, offset)
        for key, value, timestamp, of_record, offset in zip(
            columns.keys.to_list(),
            columns.values.to_list(),
            columns.timestamps.tolist(),
            of_records,
            columns.offsets.tolist(),
            strict=True,
        )
    ]


def rebuilt_one_by_one(
    batches: list[bytearray], records: list[Record], base_sequence: int = -1, **options: int | bool
) -> list[bytearray]:
    """The same batches from the same records, by `build_batch`."""
    rebuilt = []
    start = 0
    for batch in batches:
        count = read_header(batch).record_count
        sequence = base_sequence if base_sequence < 0 else (base_sequence + start) % 2**31
        rebuilt.append(build_batch(records[start : start + count], base_sequence=sequence, **options))
        start += count
    assert start == len(records)
    return rebuilt


def varied(count: int, seed: int, longest: int = 200) -> list[Record]:
    rng = random.Random(seed)
    return [
        Record(
            None if rng.random() < 0.2 else rng.randbytes(rng.randrange(20)),
            None if rng.random() < 0.1 else rng.randbytes(int(rng.paretovariate(1.2) * 10) % longest),
            1_700_000_000_000 + i * rng.randrange(3) - rng.randrange(1_000),
        )
        for i in range(count)
    ]


@settings(max_examples=80)
@given(records=records_of, codec=st.sampled_from(list(Codec)))
def test_a_batch_of_columns_is_byte_for_byte_a_batch_of_records(records: list[Record], codec: Codec) -> None:
    values, keys, timestamps = columns_of(records)
    [batch] = build_batches(
        values,
        keys,
        timestamps,
        codec=codec,
        producer_id=7,
        producer_epoch=1,
        base_sequence=3,
        transactional=True,
    )
    assert batch == build_batch(
        records, codec=codec, producer_id=7, producer_epoch=1, base_sequence=3, transactional=True
    )


@settings(max_examples=40)
@given(records=records_with_headers)
def test_headers_go_with_their_records(records: list[Record]) -> None:
    values, keys, timestamps = columns_of(records)
    [batch] = build_batches(values, keys, timestamps, [record.headers for record in records])
    assert batch == build_batch(records)
    assert records_in(read_columns(batch)) == read_records(batch)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 8_191, 8_192, 8_193, 20_000])
def test_deltas_at_the_edges_of_their_widths(count: int) -> None:
    records = varied(count, seed=count)
    values, keys, timestamps = columns_of(records)
    [batch] = build_batches(values, keys, timestamps, max_batch_bytes=1 << 30)
    assert batch == build_batch(records)
    assert records_in(read_columns(batch)) == read_records(batch)


@pytest.mark.parametrize(
    "size", [0, 1, 15, 16, 17, 53, 54, 55, 56, 57, 58, 1_023, 1_024, 1_025, 5_000, 20_000]
)
def test_values_at_the_edges_of_words_and_lengths(size: int) -> None:
    rng = random.Random(size)
    for sizes in ([size] * 20, [size, 0, 3] * 20, [1] * 50 + [size] + [1] * 50):
        records = [Record(rng.randbytes(length % 7), rng.randbytes(length), 5) for length in sizes]
        values, keys, timestamps = columns_of(records)
        [batch] = build_batches(values, keys, timestamps, max_batch_bytes=1 << 30)
        assert batch == build_batch(records)
        assert records_in(read_columns(batch)) == read_records(batch)


def test_without_keys_every_key_is_null_and_one_timestamp_stands_for_all() -> None:
    records = [Record(None, b"value %d" % i, 1_700_000_000_000) for i in range(300)]
    [batch] = build_batches(
        BinaryColumn.of([record.value for record in records]), timestamps=1_700_000_000_000
    )
    assert batch == build_batch(records)


def test_no_records_make_no_batch() -> None:
    assert build_batches(BinaryColumn.of([])) == []


@pytest.mark.parametrize("max_batch_bytes", [300, 1_000, 16_384, 100_000])
def test_batches_are_split_by_size_in_order_with_sequences_that_go_on(max_batch_bytes: int) -> None:
    records = varied(6_000, seed=max_batch_bytes)
    values, keys, timestamps = columns_of(records)
    last = 2**31 - 1_000

    batches = build_batches(
        values,
        keys,
        timestamps,
        max_batch_bytes=max_batch_bytes,
        producer_id=1,
        producer_epoch=0,
        base_sequence=last,
    )

    assert batches == rebuilt_one_by_one(batches, records, last, producer_id=1, producer_epoch=0)
    assert len(batches) > 1
    assert max(len(batch) for batch in batches) <= max_batch_bytes
    # Full but for the widest record, and a few bytes a record that deltas were taken too wide.
    for batch in batches[:-1]:
        assert len(batch) + 260 + 4 * check_batch(batch).record_count > max_batch_bytes


def test_batches_are_split_by_count() -> None:
    values = BinaryColumn.of([b"v"] * 1_000)
    batches = build_batches(values, max_records=300)
    assert [check_batch(batch).record_count for batch in batches] == [300, 300, 300, 100]


def test_a_record_that_just_fits_makes_a_batch_and_one_byte_more_is_refused() -> None:
    neighbours = [b"small"] * 200
    records = [Record(None, value, i << 40) for i, value in enumerate([*neighbours, bytes(900), *neighbours])]
    values, _, timestamps = columns_of(records)
    exactly = len(build_batch([records[200]]))

    batches = build_batches(values, timestamps=timestamps, max_batch_bytes=exactly)

    assert batches == rebuilt_one_by_one(batches, records)
    assert max(len(batch) for batch in batches) == exactly
    with pytest.raises(InvalidBatch, match="record 200") as caught:
        build_batches(values, timestamps=timestamps, max_batch_bytes=exactly - 1)
    assert caught.value.code == ErrorCode.MESSAGE_TOO_LARGE


def test_timestamps_that_do_not_fit_in_one_batch_are_refused() -> None:
    with pytest.raises(InvalidBatch) as caught:
        build_batches(BinaryColumn.of([b"", b""]), timestamps=np.array([-1, 2**63 - 1]))
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP


def test_extreme_timestamps_come_back() -> None:
    records = [Record(None, None, time) for time in (2**62, 0, -1, 2**62 + 2**61, 5)]
    values, keys, timestamps = columns_of(records)
    [batch] = build_batches(values, keys, timestamps)
    assert batch == build_batch(records)
    assert read_columns(batch).timestamps.tolist() == timestamps.tolist()


def test_arrow_slices_are_taken_as_they_are() -> None:
    # Offsets that do not begin at 0, 32 bits wide, and bytes behind a null, all of which Arrow allows.
    values = BinaryColumn(b"??onexxtwo!!", np.array([2, 5, 7, 10], np.int32), np.array([True, False, True]))
    assert values.to_list() == [b"one", None, b"two"]
    assert build_batches(values) == [build_batch([Record(None, v) for v in (b"one", None, b"two")])]


def test_a_validity_bitmap_is_read_from_any_bit() -> None:
    assert valid_from_bitmap(b"\x05\x80", 0, 4).tolist() == [True, False, True, False]
    assert valid_from_bitmap(b"\x05\x80", 2, 14).tolist() == [True] + [False] * 12 + [True]


@given(st.lists(contents, min_size=1, max_size=30), st.data())
def test_rows_are_taken_in_any_order(strings: list[bytes | None], draw: st.DataObject) -> None:
    rows = draw.draw(st.lists(st.integers(0, len(strings) - 1), max_size=40))
    taken = BinaryColumn.of(strings).take(np.array(rows, np.int64))
    assert taken.to_list() == [strings[row] for row in rows]


@settings(max_examples=60)
@given(records=records_of, codec=st.sampled_from(list(Codec)), base_offset=st.integers(0, 2**60))
def test_columns_are_read_like_records(records: list[Record], codec: Codec, base_offset: int) -> None:
    batch = build_batch(records, codec=codec, base_offset=base_offset)
    assert records_in(read_columns(batch)) == read_records(batch)


@pytest.mark.parametrize("count", [7, 8, 9, 10, 64, MAX_RUN_RECORDS + 20, 3 * MAX_RUN_RECORDS])
def test_runs_of_records_of_one_size_are_read_whole(count: int) -> None:
    records = [Record(b"%08d" % i, b"v" * 90, 0) for i in range(count)]
    records[count // 2] = Record(b"odd", b"one out", 0)
    batch = build_batch(records)
    assert records_in(read_columns(batch)) == read_records(batch)


def test_compacted_empty_and_append_time_batches_are_read_too() -> None:
    batch = build_batch(varied(50, seed=1), base_offset=10)
    slices = scan_records(batch)
    gappy = rebuild_batch(read_header(batch), slices[::7])
    empty = rebuild_batch(read_header(batch), [])
    stamp_append_time(batch, 99)
    assert records_in(read_columns(gappy)) == read_records(gappy)
    assert records_in(read_columns(empty)) == []
    assert read_columns(batch).timestamps.tolist() == [99] * 50


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(b"\x00" + b"\xff" * 9 + b"\x02" + b"\x00\x01\x01\x00", id="65 bits of timestamp"),
        pytest.param(b"\x00" + b"\x80" * 10 + b"\x00" + b"\x00\x01\x01\x00", id="11 bytes of timestamp"),
        pytest.param(b"\x00\x00" + b"\x80" * 5 + b"\x00" + b"\x01\x01\x00", id="6 bytes of offset"),
        pytest.param(b"\x00\x00\x00" + b"\x81\x80\x80\x80\x10" + b"\x01\x00", id="33 bits of key length"),
        pytest.param(b"\x00" + encode_varint(2**63 - 1) + b"\x00\x01\x01\x00", id="timestamp overflow"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_both_readers(record: bytes) -> None:
    batch = build_batch([Record(None, None, 2**40)])[:61] + encode_varint(len(record)) + record
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    with pytest.raises(InvalidBatch):
        read_records(batch)
    with pytest.raises(InvalidBatch):
        read_columns(batch)


def test_damaged_batches_are_refused_exactly_where_the_record_reader_refuses_them() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with_headers = [Record(b"k", b"value", 5 + i, [("h", b"x")] * (i % 3)) for i in range(12)]
    refused = 0
    for original in (build_batch(with_headers), build_batch([Record(b"k", b"v" * 60, 5)] * 30)):
        for _ in range(500):
            batch = bytearray(original)
            for _ in range(rng.randrange(1, 3)):
                batch[rng.randrange(23, len(batch))] = rng.choice(
                    [0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)]
                )
            write_crc(batch)
            try:
                expected = read_records(batch)
            except InvalidBatch:
                refused += 1
                with pytest.raises(InvalidBatch):
                    read_columns(batch)
            else:
                assert records_in(read_columns(batch)) == expected
    assert refused > 50


@settings(max_examples=40)
@given(
    st.lists(st.tuples(records_with_headers | records_of, st.sampled_from(Codec)), min_size=1, max_size=5),
    st.data(),
)
def test_batches_are_read_together_like_one_by_one(
    given_batches: list[tuple[list[Record], Codec]], draw: st.DataObject
) -> None:
    batches: list[bytearray] = []
    for records, codec in given_batches:
        batch = build_batch(records, codec=codec)
        kept = [each for each in scan_records(batch) if draw.draw(st.booleans())]
        batches.append(rebuild_batch(read_header(batch), kept) if draw.draw(st.booleans()) else batch)
        if draw.draw(st.booleans()):
            stamp_append_time(batches[-1], 99)
    together = read_together(batches)
    assert records_in(together) == [record for batch in batches for record in read_records(batch)]


def read_together(batches: list[bytearray]) -> RecordColumns:
    headers = [read_header(batch) for batch in batches]
    return read_columns_of(
        [(header, unpack_body(batch, header)) for header, batch in zip(headers, batches, strict=True)]
    )


def test_one_damaged_batch_among_others_is_refused() -> None:
    good = build_batch([Record(b"key", b"value", 5)] * 20)
    for at in range(61, len(good)):
        bad = bytearray(good)
        bad[at] ^= 0xFF
        try:
            expected = [*read_records(good), *read_records(bad), *read_records(good)]
        except InvalidBatch:
            with pytest.raises(InvalidBatch):
                read_together([good, bad, good])
        else:
            found = read_together([good, bad, good])
            assert records_in(found) == expected
