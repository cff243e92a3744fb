"""Every codec there and back, with other clients' codecs, and with input that means harm."""

import gzip
import io
import os
import subprocess
import sys
import tracemalloc

import cramjam
import lz4.frame
import pytest
from aiokafka import codec as aiokafka_codec
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.wire.batch import (
    InvalidBatch,
)
from semel.wire.compression import MAX_FRAMES, XERIAL_HEADER, Codec, compress, decompress
from semel.wire.errors import ErrorCode

REAL = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
MEGABYTE = 1 << 20
SAMPLE = b"".join(b'{"id": %d, "amount": %d}' % (i, i * 7919 % 1009) for i in range(5_000))

ENCODERS = {
    Codec.GZIP: aiokafka_codec.gzip_encode,
    Codec.SNAPPY: aiokafka_codec.snappy_encode,
    Codec.LZ4: aiokafka_codec.lz4_encode,
    Codec.ZSTD: aiokafka_codec.zstd_encode,
}
DECODERS = {
    Codec.GZIP: aiokafka_codec.gzip_decode,
    Codec.SNAPPY: aiokafka_codec.snappy_decode,
    Codec.LZ4: aiokafka_codec.lz4_decode,
    Codec.ZSTD: aiokafka_codec.zstd_decode,
}


def refusal(codec: int, packed: bytes, limit_bytes: int = MEGABYTE) -> InvalidBatch:
    with pytest.raises(InvalidBatch) as caught:
        decompress(codec, packed, limit_bytes)
    return caught.value


def bomb(codec: Codec) -> bytes:
    """A small body that expands by far more than it may: 32 MB or 128 MB."""
    if codec is Codec.SNAPPY:
        return bytes(compress(codec, bytes(32 * MEGABYTE)))
    if codec is Codec.ZSTD:
        compressor = zstd.ZstdCompressor()
        chunks = [compressor.compress(bytes(16 * MEGABYTE)) for _ in range(8)]
        return b"".join(chunks) + compressor.flush()
    return bytes(compress(codec, bytes(32 * MEGABYTE)))


@settings(max_examples=50)
@given(codec=st.sampled_from(list(Codec)), body=st.binary(max_size=5_000), times=st.integers(1, 30))
def test_what_goes_in_comes_out(codec: Codec, body: bytes, times: int) -> None:
    body *= times
    packed = compress(codec, memoryview(body))
    assert decompress(codec, memoryview(packed), len(body)) == body


@pytest.mark.parametrize("codec", REAL)
def test_other_clients_read_ours_and_we_read_theirs(codec: Codec) -> None:
    assert bytes(DECODERS[codec](bytes(compress(codec, SAMPLE)))) == SAMPLE
    assert decompress(codec, bytes(ENCODERS[codec](SAMPLE)), MEGABYTE) == SAMPLE


@pytest.mark.parametrize(
    ("codec", "level"), [(Codec.GZIP, 1), (Codec.GZIP, 9), (Codec.LZ4, 9), (Codec.ZSTD, 1), (Codec.ZSTD, 19)]
)
def test_a_level_is_heeded(codec: Codec, level: int) -> None:
    packed = compress(codec, SAMPLE, level)
    assert packed != compress(codec, SAMPLE)
    assert decompress(codec, packed, MEGABYTE) == SAMPLE


def test_snappy_is_written_in_java_blocks_and_read_in_those_or_plain() -> None:
    assert bytes(compress(Codec.SNAPPY, SAMPLE)).startswith(XERIAL_HEADER)
    assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(SAMPLE)), MEGABYTE) == SAMPLE


def test_the_version_in_a_java_snappy_header_is_not_looked_at() -> None:
    packed = bytearray(compress(Codec.SNAPPY, SAMPLE))
    packed[8:16] = b"\x01\x00\x00\x00\x01\x00\x00\x00"
    assert decompress(Codec.SNAPPY, packed, MEGABYTE) == SAMPLE


@pytest.mark.parametrize("codec", list(Codec))
def test_exactly_the_limit_passes_and_one_byte_more_does_not(codec: Codec) -> None:
    packed = bytes(compress(codec, SAMPLE))
    assert decompress(codec, packed, len(SAMPLE)) == SAMPLE
    assert refusal(codec, packed, len(SAMPLE) - 1).code == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("codec", REAL)
def test_a_bomb_is_refused_before_it_is_allocated(codec: Codec) -> None:
    packed = bomb(codec)
    tracemalloc.start()
    try:
        assert refusal(codec, packed).code == ErrorCode.MESSAGE_TOO_LARGE
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * MEGABYTE + len(packed)


def test_a_bomb_in_pieces_is_refused_too() -> None:
    piece = gzip.compress(bytes(MEGABYTE // 2 + 1))
    assert refusal(Codec.GZIP, piece * 2).code == ErrorCode.MESSAGE_TOO_LARGE
    frame = lz4.frame.compress(bytes(MEGABYTE // 2 + 1))
    assert refusal(Codec.LZ4, frame * 2).code == ErrorCode.MESSAGE_TOO_LARGE
    assert (
        refusal(Codec.ZSTD, zstd.compress(bytes(MEGABYTE // 2 + 1)) * 2).code == ErrorCode.MESSAGE_TOO_LARGE
    )


def test_a_snappy_length_that_cannot_be_true_is_refused_before_it_is_allocated() -> None:
    claims_200_megabytes = b"\x80\x80\x80\x64" + bytes(20)
    error = refusal(Codec.SNAPPY, claims_200_megabytes, 1 << 30)
    assert error.code == ErrorCode.CORRUPT_MESSAGE and "cannot hold" in str(error)
    assert refusal(Codec.SNAPPY, claims_200_megabytes).code == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("length", [-1, 0, 100, 2**31 - 1])
def test_a_snappy_block_that_is_not_there_is_refused(length: int) -> None:
    error = refusal(Codec.SNAPPY, XERIAL_HEADER + length.to_bytes(4, "big", signed=True) + bytes(10))
    assert error.code == ErrorCode.CORRUPT_MESSAGE and "does not fit" in str(error)


@pytest.mark.parametrize("codec", REAL)
def test_input_that_ends_too_early_is_corruption(codec: Codec) -> None:
    packed = bytes(compress(codec, SAMPLE[:2_000]))
    cuts = [cut for cut in range(len(packed)) if not (codec is Codec.SNAPPY and cut == len(XERIAL_HEADER))]
    for cut in cuts:
        assert refusal(codec, packed[:cut]).code == ErrorCode.CORRUPT_MESSAGE, cut


@pytest.mark.parametrize("codec", REAL)
def test_a_damaged_byte_gives_an_invalid_batch_or_some_bytes_but_never_another_error(codec: Codec) -> None:
    packed = bytearray(compress(codec, SAMPLE[:2_000]))
    for position in range(len(packed)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(packed)
            damaged[position] ^= flip
            try:
                decompress(codec, damaged, MEGABYTE)
            except InvalidBatch as error:
                assert str(error)


@pytest.mark.parametrize("codec", REAL)
@given(junk=st.binary(max_size=60))
def test_junk_is_never_another_error(codec: Codec, junk: bytes) -> None:
    for packed in (junk, XERIAL_HEADER + junk, bytes(compress(codec, b"some")) + junk):
        try:
            decompress(codec, packed, 1_000)
        except InvalidBatch:
            pass


def test_a_zstd_window_of_two_gigabytes_is_refused() -> None:
    # Magic, a descriptor without single segment or content size, window log 31, and an empty last block.
    frame = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"
    assert refusal(Codec.ZSTD, frame).code == ErrorCode.CORRUPT_MESSAGE
    small = frame[:5] + bytes([(20 - 10) << 3]) + frame[6:]
    assert decompress(Codec.ZSTD, small, MEGABYTE) == b""


def test_concatenated_frames_are_one_body() -> None:
    for codec in (Codec.GZIP, Codec.LZ4, Codec.ZSTD):
        packed = bytes(compress(codec, b"one ")) + bytes(compress(codec, b"two"))
        assert decompress(codec, packed, 7) == b"one two"


def test_thousands_of_empty_frames_are_refused() -> None:
    for codec in (Codec.GZIP, Codec.LZ4, Codec.ZSTD):
        packed = bytes(compress(codec, b""))
        assert decompress(codec, packed * MAX_FRAMES, 10) == b""
        assert refusal(codec, packed * (MAX_FRAMES + 1)).code == ErrorCode.CORRUPT_MESSAGE


def test_lz4_frames_that_compress_well_are_read_in_several_steps() -> None:
    body = os.urandom(100) * 50_000
    packed = lz4.frame.compress(body, block_size=lz4.frame.BLOCKSIZE_MAX4MB)
    assert len(packed) * 4 < len(body)
    assert decompress(Codec.LZ4, packed, len(body)) == body


def test_lz4_blocks_stand_alone_as_java_needs_them() -> None:
    packed = io.BytesIO(bytes(compress(Codec.LZ4, SAMPLE)))
    assert lz4.frame.get_frame_info(packed.read())["block_linked"] is False


@pytest.mark.parametrize("codec", [5, 6, 7, -1])
def test_an_unknown_codec_is_named(codec: int) -> None:
    assert refusal(codec, b"").code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    with pytest.raises(InvalidBatch):
        compress(codec, b"")


def test_the_codecs_are_not_loaded_until_they_are_used() -> None:
    script = (
        "import sys, semel.wire.records\n"
        "print([name for name in ('cramjam', 'lz4', 'backports.zstd', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
