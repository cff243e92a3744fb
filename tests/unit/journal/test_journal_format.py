"""Groups and file headers as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ConfigError
from semel.journal import format as journal_format
from semel.journal.format import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    INLINE_BYTES,
    FileHeader,
    FileHeaderError,
    Seal,
    body_is_whole,
    decode_entries,
    decode_file_header,
    decode_group_header,
    encode_file_header,
    encode_group,
)

SEAL = Seal(7, 0x0123_4567_89AB_CDEF)

buffers = st.one_of(st.binary(max_size=40), st.integers(INLINE_BYTES - 1, INLINE_BYTES + 2).map(bytes))


@given(st.lists(st.lists(buffers, max_size=4), max_size=6), st.integers(0, 2**60), st.integers(0, 2**60))
def test_a_group_is_read_back_as_it_was_written(entries: list[list[bytes]], a: int, b: int) -> None:
    position, durable = max(a, b), min(a, b)
    parts, size = encode_group(SEAL, position, durable, entries)
    encoded = b"".join(parts)
    assert len(encoded) == size
    header = decode_group_header(SEAL, encoded, 0, position)
    assert header is not None
    assert (header.position, header.durable, header.end) == (position, durable, position + size)
    body = memoryview(encoded)[GROUP_HEADER_BYTES:]
    assert body_is_whole(header, body)
    decoded = decode_entries(header, body)
    assert decoded is not None
    assert [bytes(entry) for entry in decoded] == [b"".join(entry) for entry in entries]


def test_large_buffers_are_not_copied() -> None:
    batch = memoryview(bytearray(INLINE_BYTES + 1))
    parts, _ = encode_group(SEAL, 0, 0, [[b"header", batch], [b"small"]])
    assert any(part is batch for part in parts)
    assert len(parts) == 3


def test_every_flipped_bit_of_a_group_is_noticed() -> None:
    parts, _ = encode_group(SEAL, 1000, 900, [[b"one"], [b"two"]])
    whole = b"".join(parts)
    for offset in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            header = decode_group_header(SEAL, damaged, 0, 1000)
            assert header is None or not body_is_whole(header, memoryview(damaged)[GROUP_HEADER_BYTES:])
            assert header is None or offset >= GROUP_HEADER_BYTES


@pytest.mark.parametrize(
    "other", [Seal(8, SEAL.salt), Seal(7, SEAL.salt ^ 2), Seal(7, SEAL.salt ^ (1 << 40))]
)
def test_a_group_counts_only_under_its_own_generation_and_salt(other: Seal) -> None:
    encoded = b"".join(encode_group(SEAL, 1000, 900, [[b"one"]])[0])
    assert decode_group_header(other, encoded, 0, 1000) is None


def test_a_group_counts_only_at_its_own_position() -> None:
    encoded = b"".join(encode_group(SEAL, 1000, 900, [[b"one"]])[0])
    assert decode_group_header(SEAL, encoded, 0, 1000) is not None
    assert decode_group_header(SEAL, encoded, 0, 1001) is None


def test_a_group_cannot_claim_what_lies_behind_it() -> None:
    encoded = b"".join(encode_group(SEAL, 1000, 1001, [[b"one"]])[0])
    assert decode_group_header(SEAL, encoded, 0, 1000) is None


def test_untouched_blocks_do_not_look_like_groups() -> None:
    assert Seal(0, 0).mark_bytes != bytes(4)
    assert decode_group_header(Seal(0, 0), bytes(100), 0, 0) is None


def test_a_group_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_format, "MAX_GROUP_BYTES", 1000)
    with pytest.raises(ConfigError, match="one request would write 1044 bytes"):
        encode_group(SEAL, 0, 0, [[bytes(1000)]])


def test_a_file_header_is_read_back_as_it_was_written() -> None:
    block = encode_file_header(FileHeader(SEAL, 5000, 6000))
    assert len(block) == FILE_HEADER_BYTES
    header = decode_file_header(block)
    assert (header.seal.generation, header.seal.salt) == (SEAL.generation, SEAL.salt)
    assert (header.base, header.start) == (5000, 6000)


def test_a_damaged_file_header_is_refused() -> None:
    block = encode_file_header(FileHeader(SEAL, 5000, 6000))
    for offset in range(44):
        damaged = bytearray(block)
        damaged[offset] ^= 1
        with pytest.raises(FileHeaderError):
            decode_file_header(bytes(damaged))
    with pytest.raises(FileHeaderError, match="it has 20 bytes"):
        decode_file_header(block[:20])
