"""Records there and back, against other clients' codecs, and every way in which a body can be wrong."""

import random
from typing import Any

import pytest
from aiokafka.record.default_records import (
    _DefaultRecordBatchBuilderPy as AioBuilder,
)
from aiokafka.record.default_records import (
    _DefaultRecordBatchPy as AioBatch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from semel.wire.batch import (
    BatchHeader,
    InvalidBatch,
    check_batch,
    check_crc,
    read_header,
    stamp_append_time,
    write_crc,
)
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.records import (
    Record,
    RecordReader,
    assemble_batch,
    build_batch,
    build_end_marker,
    encode_varint,
    first_offset_at_or_after,
    max_timestamp_offset,
    read_end_marker,
    read_records,
    read_varint,
    read_varlong,
    rebuild_batch,
    scan_records,
)

CODECS = list(Codec)
contents = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.text(max_size=10), contents), max_size=3)
record_lists = st.lists(
    st.builds(Record, contents, contents, st.integers(0, 2**53), headers), min_size=1, max_size=20
)


def sample(count: int = 10) -> list[Record]:
    return [
        Record(b"key-%d" % (i % 4), b"value-%d" % i * 5, 1_700_000_000_000 + i, [("trace", b"%d" % i)], i)
        for i in range(count)
    ]


def numbered(records: list[Record], base_offset: int = 0) -> list[Record]:
    return [Record(r.key, r.value, r.timestamp, r.headers, base_offset + i) for i, r in enumerate(records)]


def refusal(batch: bytes | bytearray, **options: int) -> InvalidBatch:
    with pytest.raises(InvalidBatch) as caught:
        read_records(batch, **options)
    return caught.value


def batch_of(body: bytes, count: int = 1, **fields: int) -> bytearray:
    """A batch with a right checksum and length around whatever `body` is."""
    values = {
        "base_offset": 0,
        "size": 0,
        "leader_epoch": 0,
        "crc": 0,
        "attributes": 0,
        "last_offset_delta": count - 1,
        "base_timestamp": 0,
        "max_timestamp": 0,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        "record_count": count,
        **fields,
    }
    return assemble_batch(BatchHeader(**values), body)


def record_of(rest: bytes, length: int | None = None) -> bytes:
    """A record that begins rightly (attributes and both deltas 0) and goes on with `rest`."""
    record = b"\x00\x00\x00" + rest
    return encode_varint(len(record) if length is None else length) + record


@settings(max_examples=60)
@given(records=record_lists, codec=st.sampled_from(CODECS), base_offset=st.integers(0, 2**60))
def test_what_is_built_is_read_back(records: list[Record], codec: Codec, base_offset: int) -> None:
    batch = build_batch(records, codec=codec, base_offset=base_offset)

    header = check_batch(batch)

    assert read_records(batch) == numbered(records, base_offset)
    assert header.codec == codec
    assert header.max_timestamp == max(record.timestamp for record in records)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)


@settings(max_examples=60)
@given(records=record_lists, limit=st.integers(1, 4))
def test_a_batch_that_is_read_bit_by_bit_is_the_same(records: list[Record], limit: int) -> None:
    batch = build_batch(records)
    reader = RecordReader(batch, Record)
    found: list[Record] = []
    while reader.left:
        some = reader.read(limit)
        assert 0 < len(some) <= limit
        found += some
    assert found == read_records(batch)
    assert reader.read(limit) == []


def test_a_batch_may_end_with_a_header_without_a_value() -> None:
    records = [Record(b"k", b"v", 1, [("h", None)])]
    assert read_records(build_batch(records)) == numbered(records, 0)


def oracle_build(builder: Any, records: list[Record]) -> bytes:
    for i, r in enumerate(records):
        builder.append(i, r.timestamp, r.key, r.value, list(r.headers))
    return bytes(builder.build())


@settings(max_examples=60)
@given(records=record_lists)
def test_batches_are_byte_for_byte_what_other_clients_build(records: list[Record]) -> None:
    ours = build_batch(
        records, leader_epoch=0, producer_id=9, producer_epoch=2, base_sequence=5, transactional=True
    )
    theirs = oracle_build(DefaultRecordBatchBuilder(2, 0, True, 9, 2, 5, 1 << 20), records)
    assert bytes(ours) == theirs


@pytest.mark.parametrize("codec", CODECS)
def test_aiokafka_reads_what_we_write(codec: Codec) -> None:
    records = sample(500)
    theirs = AioBatch(bytes(build_batch(records, codec=codec)))
    assert theirs.validate_crc()
    read = [Record(r.key, r.value, r.timestamp, r.headers, r.offset) for r in theirs]
    assert read == records


@pytest.mark.parametrize("codec", CODECS)
def test_we_read_what_aiokafka_writes(codec: Codec) -> None:
    records = sample(500)
    batch = oracle_build(AioBuilder(2, int(codec), 0, -1, -1, -1, 1 << 20), records)
    assert read_header(batch).codec == codec
    assert read_records(batch) == records


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.LZ4])
def test_kafka_python_reads_and_writes_the_same_records(codec: Codec) -> None:
    records = sample(500)
    theirs = DefaultRecordBatch(build_batch(records, codec=codec))
    assert theirs.validate_crc()
    assert [Record(r.key, r.value, r.timestamp, r.headers, r.offset) for r in theirs] == records
    batch = oracle_build(DefaultRecordBatchBuilder(2, int(codec), False, -1, -1, -1, 1 << 20), records)
    assert read_records(batch) == records


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_there_and_back(value: int) -> None:
    encoded = encode_varint(value)
    assert read_varlong(b"?" + encoded, 1) == (value, 1 + len(encoded))
    if -(2**31) <= value < 2**31:
        assert len(encoded) <= 5 and read_varint(encoded, 0) == (value, len(encoded))
    else:
        with pytest.raises(InvalidBatch):
            read_varint(encoded, 0)


@pytest.mark.parametrize("value", [-1, 0, 1, 63, 64, -64, -65, 8190, 8191, 8192, 2**31 - 1, -(2**31)])
def test_varints_at_the_edges_of_their_widths(value: int) -> None:
    assert read_varint(encode_varint(value), 0)[0] == value


def test_varints_that_are_too_long_are_refused() -> None:
    six, eleven = b"\x80" * 5 + b"\x01", b"\x80" * 10 + b"\x01"
    with pytest.raises(InvalidBatch, match="32 bits"):
        read_varint(six, 0)
    with pytest.raises(InvalidBatch, match="64 bits"):
        read_varlong(eleven, 0)
    with pytest.raises(InvalidBatch, match="32 bits"):
        read_varint(b"\xff\xff\xff\xff\x7f", 0)
    with pytest.raises(InvalidBatch, match="64 bits"):
        read_varlong(b"\xff" * 9 + b"\x02", 0)


FIELDS = b"\x01\x01\x00"  # null key, null value, no headers
TOO_LONG = b"\x80" * 5 + b"\x01"


def test_the_smallest_record_is_read() -> None:
    assert read_records(batch_of(record_of(FIELDS))) == [Record(None, None, 0, [], 0)]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (bytes(7), 1),
        (record_of(FIELDS), 2),
        (record_of(FIELDS) + b"\x00", 1),
        (record_of(FIELDS) + record_of(FIELDS), 1),
        (record_of(FIELDS, length=7) + b"\x00", 1),
        (record_of(FIELDS, length=5), 1),
        (record_of(FIELDS, length=-1), 1),
        (record_of(FIELDS, length=2**31 - 1), 1),
        (record_of(FIELDS, length=100), 1),
        (TOO_LONG + bytes(10), 1),
        (record_of(b"\x03\x01\x00"), 1),
        (record_of(b"\x01\x03\x00"), 1),
        (record_of(encode_varint(2**31 - 1) + b"\x01\x00"), 1),
        (record_of(b"\x04ab\x01"), 1),
        (record_of(b"\x06ab\x01\x00"), 1),
        (record_of(TOO_LONG + b"\x01\x00"), 1),
        (record_of(b"\x01\x01" + encode_varint(2**31 - 1)), 1),
        (record_of(b"\x01\x01\x01"), 1),
        (record_of(b"\x01\x01\x02"), 1),
        (record_of(b"\x01\x01\x02\x01\x01"), 1),
        (record_of(b"\x01\x01\x02\x02a\x10b"), 1),
        (encode_varint(8) + b"\x00\x00\x80\x80" + FIELDS + b"\x00", 1),
        (encode_varint(6) + b"\x00\x00\x02" + FIELDS, 1),
        (encode_varint(6) + b"\x00\x00\x01" + FIELDS, 1),
        (record_of(FIELDS) + record_of(FIELDS), 2),
        (encode_varint(6) + b"\x00\x00\x02" + FIELDS + record_of(FIELDS), 2),
        (encode_varint(17) + b"\x00" + b"\x80" * 10 + b"\x01\x00" + FIELDS + b"\x00", 1),
        (encode_varint(12) + b"\x00\x00\x00\x01\x01\x80\x80\x80", 1),
        (bytes(21), 2**31 - 1),
        (bytes(21), -1),
    ],
)
def test_a_malformed_body_is_refused_as_such(body: bytes, count: int) -> None:
    error = refusal(batch_of(body, count))
    assert error.code == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize(
    ("body", "count", "why"),
    [
        (record_of(FIELDS, length=-1), 1, "a record of -1 bytes at byte 1 does not fit"),
        (record_of(FIELDS, length=100), 1, "a record of 100 bytes at byte 2 does not fit"),
        (record_of(b"\x0eab\x01\x00") + bytes(9), 1, "a field of 7 bytes at byte 5 reaches past its record"),
        (record_of(b"\x01\x01" + encode_varint(2**31 - 1)), 1, "2147483647 headers do not fit"),
        (bytes(21), 2**31 - 1, "21 bytes cannot be 2147483647 records"),
    ],
)
def test_a_refusal_says_what_is_wrong_before_anything_is_read_for_it(
    body: bytes, count: int, why: str
) -> None:
    assert why in str(refusal(batch_of(body, count)))


def test_a_timestamp_delta_that_overflows_is_refused() -> None:
    body = encode_varint(6) + b"\x00\x02\x00" + FIELDS
    assert read_records(batch_of(body, base_timestamp=2**63 - 2))[0].timestamp == 2**63 - 1
    assert refusal(batch_of(body, base_timestamp=2**63 - 1)).code == ErrorCode.INVALID_RECORD


def test_a_batch_that_is_cut_off_is_refused() -> None:
    batch = build_batch(sample())
    for size in range(len(batch)):
        with pytest.raises(InvalidBatch):
            read_records(batch[:size])


@pytest.mark.parametrize("codec", CODECS)
def test_a_body_beyond_the_limit_is_refused_as_too_large(codec: Codec) -> None:
    batch = build_batch([Record(None, bytes(100_000))], codec=codec)
    assert refusal(batch, limit_bytes=100_000).code == ErrorCode.MESSAGE_TOO_LARGE
    assert len(read_records(batch, limit_bytes=100_100)) == 1


def test_mutated_batches_are_read_or_refused_and_nothing_else() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for codec in CODECS:
        original = build_batch(sample(20), codec=codec)
        for _ in range(400):
            batch = bytearray(original)
            for _ in range(rng.randrange(1, 4)):
                batch[rng.randrange(12, len(batch))] = rng.randrange(256)
            write_crc(batch)
            for read in (read_records, scan_records, max_timestamp_offset):
                try:
                    read(batch, limit_bytes=1 << 20)
                except InvalidBatch as error:
                    assert error.code and str(error)


@given(st.binary(max_size=100), st.integers(0, 20))
def test_any_body_is_read_or_refused(body: bytes, count: int) -> None:
    try:
        assert len(read_records(batch_of(body, count))) == count
    except InvalidBatch:
        pass


def test_header_keys_that_are_not_text_survive() -> None:
    body = record_of(b"\x01\x01\x02\x04\xff\xfe\x01")
    [record] = read_records(batch_of(body))
    again = build_batch([record])
    assert read_records(again)[0].headers == record.headers
    assert again[61:] == batch_of(body)[61:]


def test_a_batch_of_nothing_is_not_built() -> None:
    with pytest.raises(InvalidBatch):
        build_batch([])


def test_timestamps_too_far_apart_for_one_batch_are_refused() -> None:
    with pytest.raises(InvalidBatch) as caught:
        build_batch([Record(None, None, -1), Record(None, None, 2**63 - 1)])
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP


def test_append_time_hides_the_producers_timestamps() -> None:
    batch = build_batch(sample(3))
    stamp_append_time(batch, 5)
    assert [record.timestamp for record in read_records(batch)] == [5, 5, 5]
    assert first_offset_at_or_after(batch, 5) == (0, 5)
    assert first_offset_at_or_after(batch, 6) is None
    assert max_timestamp_offset(batch) == (0, 5)


def test_offsets_are_found_by_time() -> None:
    times = [10, 30, 20, 30, 5]
    batch = build_batch([Record(None, b"v", time) for time in times], base_offset=100)
    assert max_timestamp_offset(batch) == (101, 30)
    assert first_offset_at_or_after(batch, 0) == (100, 10)
    assert first_offset_at_or_after(batch, 11) == (101, 30)
    assert first_offset_at_or_after(batch, 30) == (101, 30)
    assert first_offset_at_or_after(batch, 31) is None


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_is_what_other_clients_take_for_one(commit: bool) -> None:
    marker = build_end_marker(
        commit=commit,
        producer_id=2**40,
        producer_epoch=7,
        coordinator_epoch=12,
        timestamp=1_700_000_000_000,
        base_offset=99,
        leader_epoch=4,
    )

    header = read_header(marker)
    check_crc(marker, header)
    assert header.is_control and header.is_transactional and header.base_sequence == -1
    assert (header.base_offset, header.last_offset, header.leader_epoch) == (99, 99, 4)
    theirs = DefaultRecordBatch(bytearray(marker))
    assert theirs.validate_crc() and theirs.is_control_batch
    [control] = list(theirs)
    assert (control.commit, control.abort) == (commit, not commit)
    ours = read_end_marker(marker)
    assert ours is not None
    assert (ours.commit, ours.producer_id, ours.producer_epoch, ours.coordinator_epoch) == (
        commit,
        2**40,
        7,
        12,
    )


def test_a_marker_is_the_control_batch_that_the_builder_would_make() -> None:
    built = build_batch(
        [Record(b"\x00\x00\x00\x01", b"\x00\x00\x00\x00\x00\x05", 77)],
        base_offset=3,
        leader_epoch=2,
        producer_id=1,
        producer_epoch=0,
        transactional=True,
    )
    built[22] |= 0x20
    write_crc(built)
    marker = build_end_marker(
        commit=True,
        producer_id=1,
        producer_epoch=0,
        coordinator_epoch=5,
        timestamp=77,
        base_offset=3,
        leader_epoch=2,
    )
    assert marker == built


def test_control_records_of_other_kinds_are_passed_over() -> None:
    batch = build_batch([Record(b"\x00\x00\x00\x02", b"leader change")])
    batch[22] |= 0x20
    assert read_end_marker(batch) is None
    with pytest.raises(InvalidBatch, match="not a control batch"):
        read_end_marker(build_batch(sample(1)))


def test_a_marker_without_its_epoch_is_refused() -> None:
    batch = build_batch([Record(b"\x00\x00\x00\x01", b"\x00\x00")])
    batch[22] |= 0x20
    with pytest.raises(InvalidBatch, match="coordinator epoch"):
        read_end_marker(batch)


@pytest.mark.parametrize("codec", CODECS)
def test_compaction_keeps_offsets_sequences_and_bytes_of_what_it_keeps(codec: Codec) -> None:
    records = sample(10)
    original = build_batch(
        records,
        codec=codec,
        base_offset=0,
        leader_epoch=3,
        producer_id=8,
        producer_epoch=1,
        base_sequence=40,
        transactional=True,
    )
    header = read_header(original)
    slices = scan_records(original)
    assert [(s.offset, s.key, s.timestamp) for s in slices] == [
        (r.offset, r.key, r.timestamp) for r in records
    ]

    rebuilt = rebuild_batch(header, [s for s in slices if s.offset in (2, 3, 7)])

    again = read_header(rebuilt)
    check_crc(rebuilt, again)
    assert read_records(rebuilt) == [records[2], records[3], records[7]]
    assert (again.base_offset, again.last_offset, again.record_count) == (0, 9, 3)
    assert (again.base_sequence, again.last_sequence, again.leader_epoch) == (40, 49, 3)
    assert (again.producer_id, again.producer_epoch, again.attributes) == (8, 1, header.attributes)
    assert again.base_timestamp == header.base_timestamp
    assert again.max_timestamp == records[7].timestamp
    theirs = DefaultRecordBatch(rebuild_batch(header, slices)) if codec == Codec.NONE else None
    assert theirs is None or [r.offset for r in theirs] == list(range(10))


def test_keeping_everything_changes_nothing() -> None:
    original = build_batch(sample(10), base_offset=5, producer_id=8, producer_epoch=1, base_sequence=40)
    assert rebuild_batch(read_header(original), scan_records(original)) == original


def test_an_emptied_batch_still_says_where_its_producer_was() -> None:
    original = build_batch(
        sample(10), codec=Codec.ZSTD, base_offset=100, producer_id=8, producer_epoch=1, base_sequence=40
    )

    empty = rebuild_batch(read_header(original), [])

    header = read_header(empty)
    check_crc(empty, header)
    assert (len(empty), header.record_count, header.codec) == (61, 0, 0)
    assert (header.base_offset, header.last_offset, header.last_sequence) == (100, 109, 49)
    assert header.max_timestamp == read_header(original).max_timestamp
    assert read_records(empty) == [] and scan_records(empty) == []
    assert max_timestamp_offset(empty) is None
    assert list(DefaultRecordBatch(empty)) == []


def test_a_delete_horizon_leaves_timestamps_as_they_were_and_stays() -> None:
    records = sample(4)
    original = build_batch(records)

    once = rebuild_batch(read_header(original), scan_records(original), delete_horizon_ms=1_900_000_000_000)
    twice = rebuild_batch(read_header(once), scan_records(once)[1:])

    assert read_header(once).delete_horizon_ms == 1_900_000_000_000
    assert read_header(twice).delete_horizon_ms == 1_900_000_000_000
    assert read_records(once) == records
    assert read_records(twice) == records[1:]
    assert read_header(once).max_timestamp == records[-1].timestamp


def test_append_time_stays_when_a_batch_is_compacted() -> None:
    original = build_batch(sample(4))
    stamp_append_time(original, 12_345)
    rebuilt = rebuild_batch(read_header(original), scan_records(original)[:1])
    assert read_header(rebuilt).has_append_time and read_header(rebuilt).max_timestamp == 12_345
    assert rebuild_batch(read_header(original), scan_records(original)) == original


def test_tombstones_are_known_without_reading_values() -> None:
    batch = build_batch([Record(b"a", None), Record(b"b", b""), Record(None, b"c")])
    assert [(s.key, s.is_tombstone) for s in scan_records(batch)] == [
        (b"a", True),
        (b"b", False),
        (None, False),
    ]


def test_a_damaged_compressed_body_is_corruption() -> None:
    batch = build_batch(sample(50), codec=Codec.GZIP)
    batch[70:90] = bytes(20)
    assert refusal(batch).code == ErrorCode.CORRUPT_MESSAGE
