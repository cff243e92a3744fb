"""What a batch header is accepted for, refused for, and how a batch is placed and stamped."""

import struct

import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from semel.wire.batch import (
    HEADER,
    BatchHeader,
    InvalidBatch,
    check_batch,
    check_crc,
    iter_batches,
    place_batch,
    read_header,
    stamp_append_time,
    write_crc,
)
from semel.wire.errors import ErrorCode

FIELDS = {
    "base_offset": 0,
    "length": 0,
    "leader_epoch": 0,
    "magic": 2,
    "crc": 0,
    "attributes": 0,
    "last_offset_delta": 2,
    "base_timestamp": 1_000,
    "max_timestamp": 1_002,
    "producer_id": -1,
    "producer_epoch": -1,
    "base_sequence": -1,
    "record_count": 3,
}
BODY = bytes(21)


def make(body: bytes = BODY, **fields: int) -> bytearray:
    """A batch with a right length and checksum, whatever else is wrong with it."""
    values = {**FIELDS, "length": 49 + len(body), **fields}
    buf = bytearray(HEADER.pack(*values.values()) + body)
    write_crc(buf)
    return buf


def oracle(count: int = 3, **options: int | bool) -> bytes:
    """A batch as kafka-python builds it."""
    settings = {
        "compression_type": 0,
        "is_transactional": False,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        "batch_size": 1 << 20,
    }
    builder = DefaultRecordBatchBuilder(2, **{**settings, **options})
    for i in range(count):
        builder.append(i, 1_000 + i, b"key", b"value", [])
    return bytes(builder.build())


def refusal(buf: bytes | bytearray) -> InvalidBatch:
    with pytest.raises(InvalidBatch) as caught:
        check_batch(buf)
    return caught.value


def test_a_batch_of_another_client_is_accepted_and_read_alike() -> None:
    buf = oracle(is_transactional=True, producer_id=7, producer_epoch=3, base_sequence=11)
    theirs = DefaultRecordBatch(bytearray(buf))

    ours = check_batch(buf)

    assert ours.size == len(buf)
    assert ours.crc == theirs.crc
    assert (ours.producer_id, ours.producer_epoch, ours.base_sequence) == (7, 3, 11)
    assert (ours.base_offset, ours.last_offset, ours.record_count) == (0, 2, 3)
    assert (ours.base_timestamp, ours.max_timestamp) == (1_000, 1_002)
    assert ours.is_transactional and not ours.is_control and not ours.has_append_time
    assert ours.codec == 0 and ours.last_sequence == 13 and ours.delete_horizon_ms is None


def test_a_memoryview_is_checked_like_bytes() -> None:
    buf = bytearray(b"??") + bytearray(oracle())
    assert check_batch(memoryview(buf)[2:]).record_count == 3


def test_sequences_wrap_to_zero_after_the_largest() -> None:
    header = check_batch(make(producer_id=1, producer_epoch=0, base_sequence=2**31 - 2))
    assert header.last_sequence == 0
    assert check_batch(make()).last_sequence == -1


@pytest.mark.parametrize("position", range(21, 61 + len(BODY)))
def test_a_flipped_bit_anywhere_under_the_checksum_is_corruption(position: int) -> None:
    buf = make()
    buf[position] ^= 0x10
    assert refusal(buf).code == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"magic": 0}, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        ({"magic": 1}, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        ({"magic": 9}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": 48}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": -1}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": -(2**31)}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": 2**31 - 1}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": 49 + len(BODY) + 1}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": 49 + len(BODY) - 1}, ErrorCode.INVALID_RECORD),
        ({"attributes": 5}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"attributes": 7}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"attributes": 0x08}, ErrorCode.INVALID_TIMESTAMP),
        ({"attributes": 0x20}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x40}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x80}, ErrorCode.INVALID_RECORD),
        ({"attributes": -(2**15)}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x10}, ErrorCode.INVALID_RECORD),
        ({"record_count": 0, "last_offset_delta": -1}, ErrorCode.INVALID_RECORD),
        ({"record_count": -1, "last_offset_delta": -2}, ErrorCode.INVALID_RECORD),
        ({"record_count": 3, "last_offset_delta": 3}, ErrorCode.INVALID_RECORD),
        ({"record_count": 4, "last_offset_delta": 3}, ErrorCode.INVALID_RECORD),
        ({"record_count": 2**31 - 1, "last_offset_delta": 2**31 - 2}, ErrorCode.INVALID_RECORD),
        (
            {"attributes": 4, "record_count": 2**31 - 1, "last_offset_delta": 2**31 - 2},
            ErrorCode.INVALID_RECORD,
        ),
        ({"producer_id": -2}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "producer_epoch": -1, "base_sequence": 0}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "producer_epoch": 0, "base_sequence": -1}, ErrorCode.INVALID_RECORD),
    ],
)
def test_a_batch_that_no_producer_may_send_is_refused_with_its_code(
    fields: dict[str, int], code: int
) -> None:
    error = refusal(make(**fields))
    assert error.code == code
    assert str(error)


@pytest.mark.parametrize("size", [0, 11, 12, 16, 17, 60])
def test_less_than_a_header_is_corruption(size: int) -> None:
    assert refusal(oracle()[:size]).code == ErrorCode.CORRUPT_MESSAGE


def test_an_old_message_shorter_than_a_header_is_named_too_old() -> None:
    old = bytearray(40)
    old[16] = 1
    assert refusal(old).code == ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


def test_two_batches_in_one_are_refused() -> None:
    assert refusal(oracle() + oracle()).code == ErrorCode.INVALID_RECORD


def test_the_sequence_of_a_plain_producer_means_nothing() -> None:
    assert check_batch(make(base_sequence=0, producer_epoch=0)).producer_id == -1


def test_placing_a_batch_changes_offset_and_epoch_and_keeps_the_checksum() -> None:
    buf = bytearray(oracle())
    before = bytes(buf)

    place_batch(memoryview(buf), 2**40, 17)

    header = check_batch(buf)
    assert (header.base_offset, header.last_offset, header.leader_epoch) == (2**40, 2**40 + 2, 17)
    assert buf[16:] == before[16:] and buf[8:12] == before[8:12]


def test_append_time_is_what_readers_then_see() -> None:
    buf = bytearray(oracle())

    stamp_append_time(buf, 99_999)

    header = read_header(buf)
    check_crc(buf, header)
    assert header.has_append_time and header.max_timestamp == 99_999 and header.base_timestamp == 1_000
    theirs = DefaultRecordBatch(bytearray(buf))
    assert theirs.validate_crc()
    assert [record.timestamp for record in theirs] == [99_999] * 3


def test_batches_follow_each_other_and_a_cut_last_one_is_left_out() -> None:
    first, second = oracle(3), oracle(5)
    for cut in range(len(second)):
        found = list(iter_batches(first + second[:cut]))
        assert [header.record_count for header, _ in found] == [3]
        assert found[0][1] == first
    assert [h.record_count for h, _ in iter_batches(first + second)] == [3, 5]
    assert list(iter_batches(b"")) == []


@pytest.mark.parametrize("length", [48, 0, -12, -(2**31)])
def test_iteration_stops_with_an_error_where_a_length_would_not_move_it_on(length: int) -> None:
    buf = oracle() + bytes(make(length=length))
    with pytest.raises(InvalidBatch):
        list(iter_batches(buf))


def test_iteration_names_an_old_message_instead_of_leaving_it_out() -> None:
    old = bytearray(40)
    old[16] = 1
    with pytest.raises(InvalidBatch, match="too old"):
        list(iter_batches(old))


def test_the_delete_horizon_is_the_base_timestamp() -> None:
    assert read_header(make(attributes=0x40)).delete_horizon_ms == 1_000


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_as_an_invalid_batch(buf: bytes) -> None:
    for read in (read_header, check_batch, list_batches):
        try:
            read(buf)
        except InvalidBatch:
            pass


@given(position=st.integers(0, 60), value=st.integers(0, 255))
def test_a_mutated_header_with_a_right_checksum_is_accepted_or_refused(position: int, value: int) -> None:
    buf = make()
    buf[position] = value
    struct.pack_into(">I", buf, 17, crc32.iscsi(bytes(buf[21:])))
    for read in (check_batch, list_batches):
        try:
            read(buf)
        except InvalidBatch:
            pass


def list_batches(buf: bytes | bytearray) -> list[tuple[BatchHeader, memoryview]]:
    return list(iter_batches(buf))
