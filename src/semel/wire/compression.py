"""The codecs of a record batch's body, with a bound on what may come out of them.

A kilobyte can decompress to a gigabyte, so every reader states how much it will take, and the codec stops
there: before the memory is allocated, not after. Input that ends too early, that is damaged or that asks for
a window larger than anybody writes raises `InvalidBatch` like every other damage.

Snappy is written in the blocks of the Java library that Kafka's own clients use, and read in those or plain,
as clients differ. Codec modules are imported when first used: a broker that never opens a batch never loads
them.
"""

import sys
import zlib
from enum import IntEnum
from struct import Struct
from typing import Final

from semel.wire.batch import (
    Buffer,
    InvalidBatch,
)
from semel.wire.errors import ErrorCode

# A body is normally one frame. Each further one costs a copy of the rest, so thousands are an attack.
MAX_FRAMES: Final = 100
# 2^27 bytes: what the highest levels of zstd write, and what other readers allow.
ZSTD_WINDOW_LOG_MAX: Final = 27
GZIP_WBITS: Final = zlib.MAX_WBITS | 16
# The Java library's block size. A block of its own length and no more is what some readers can take.
SNAPPY_BLOCK_BYTES: Final = 32 * 1024
# Three bytes of snappy copy 64 at most; a header that claims a higher ratio is a lie.
SNAPPY_MAX_RATIO: Final = 22
XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
XERIAL_HEADER: Final = XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
BLOCK_LENGTH: Final = Struct(">i")
# The first guess at what an lz4 frame holds is its size times this; the library allocates the guess.
LZ4_GUESSED_RATIO: Final = 4
LZ4_MIN_CHUNK_BYTES: Final = 64 * 1024


class Codec(IntEnum):
    """The compression of a batch, as its attributes say it."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(codec: int, buf: Buffer, level: int | None = None) -> Buffer:
    """The body `buf` in `codec`, at the codec's own default level unless one is given (snappy has none)."""
    if codec == Codec.NONE:
        return buf
    if codec == Codec.GZIP:
        return _compress_gzip(buf, level)
    if codec == Codec.SNAPPY:
        return _compress_snappy(memoryview(buf))
    if codec == Codec.LZ4:
        return _compress_lz4(buf, level)
    if codec == Codec.ZSTD:
        return _compress_zstd(buf, level)
    raise _unknown(codec)


def decompress(codec: int, buf: Buffer, limit_bytes: int) -> Buffer:
    """What `buf` holds, if that is `limit_bytes` or less; InvalidBatch if it is more, damaged or cut off."""
    if codec == Codec.NONE:
        if len(buf) > limit_bytes:
            raise _too_large(limit_bytes)
        return buf
    if codec == Codec.GZIP:
        return _decompress_gzip(buf, limit_bytes)
    if codec == Codec.SNAPPY:
        return _decompress_snappy(memoryview(buf), limit_bytes)
    if codec == Codec.LZ4:
        return _decompress_lz4(buf, limit_bytes)
    if codec == Codec.ZSTD:
        return _decompress_zstd(buf, limit_bytes)
    raise _unknown(codec)


def _compress_gzip(buf: Buffer, level: int | None) -> bytes:
    compressor = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, GZIP_WBITS)
    return compressor.compress(buf) + compressor.flush()


def _decompress_gzip(buf: Buffer, limit_bytes: int) -> bytes:
    members: list[bytes] = []
    room = limit_bytes
    rest = buf
    for _ in range(MAX_FRAMES):
        decompressor = zlib.decompressobj(GZIP_WBITS)
        try:
            member = decompressor.decompress(rest, room + 1)
        except zlib.error as error:
            raise _damaged("gzip", str(error)) from error
        room -= len(member)
        if room < 0:
            raise _too_large(limit_bytes)
        if not decompressor.eof:
            raise _damaged("gzip", "it ends too early")
        members.append(member)
        rest = decompressor.unused_data
        if not rest:
            return _join(members)
    raise _damaged("gzip", f"it has more than {MAX_FRAMES} members")


def _compress_snappy(view: memoryview) -> bytes:
    from cramjam import snappy

    parts = [XERIAL_HEADER]
    for start in range(0, len(view), SNAPPY_BLOCK_BYTES):
        block = bytes(snappy.compress_raw(view[start : start + SNAPPY_BLOCK_BYTES]))
        parts.append(BLOCK_LENGTH.pack(len(block)))
        parts.append(block)
    return b"".join(parts)


def _decompress_snappy(view: memoryview, limit_bytes: int) -> bytes:
    if bytes(view[: len(XERIAL_MAGIC)]) != XERIAL_MAGIC:
        return _decompress_snappy_block(view, limit_bytes, limit_bytes)
    blocks: list[bytes] = []
    room = limit_bytes
    pos = len(XERIAL_HEADER)
    if pos > len(view):
        raise _damaged("snappy", "it ends too early")
    while pos < len(view):
        start = pos + BLOCK_LENGTH.size
        if start > len(view):
            raise _damaged("snappy", "it ends too early")
        pos = start + int(BLOCK_LENGTH.unpack_from(view, pos)[0])
        if not start < pos <= len(view):
            raise _damaged("snappy", f"a block of {pos - start} bytes does not fit")
        block = _decompress_snappy_block(view[start:pos], room, limit_bytes)
        room -= len(block)
        blocks.append(block)
    return _join(blocks)


def _decompress_snappy_block(block: memoryview, room: int, limit_bytes: int) -> bytes:
    import cramjam

    try:
        claimed: int = cramjam.snappy.decompress_raw_len(block)
        if claimed > room:
            raise _too_large(limit_bytes)
        if claimed > len(block) * SNAPPY_MAX_RATIO:
            raise _damaged("snappy", f"{len(block)} bytes cannot hold the {claimed} claimed")
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise _damaged("snappy", str(error)) from error


def _compress_lz4(buf: Buffer, level: int | None) -> bytes:
    from lz4 import frame

    # Blocks that refer to earlier ones are smaller, but Kafka's Java clients cannot read them.
    compressed: bytes = frame.compress(
        buf, compression_level=level or 0, block_linked=False, store_size=False
    )
    return compressed


def _decompress_lz4(buf: Buffer, limit_bytes: int) -> bytes:
    from lz4 import frame

    chunks: list[bytes] = []
    chunk_bytes = max(len(buf) * LZ4_GUESSED_RATIO, LZ4_MIN_CHUNK_BYTES)
    room = limit_bytes
    rest: Buffer = buf
    frames = 0
    decompressor = frame.LZ4FrameDecompressor()
    while frames < MAX_FRAMES:
        try:
            chunk: bytes = decompressor.decompress(rest, max_length=min(chunk_bytes, room + 1))
        except (RuntimeError, EOFError) as error:
            raise _damaged("lz4", str(error)) from error
        room -= len(chunk)
        if room < 0:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
        rest = b""
        if decompressor.eof:
            rest = decompressor.unused_data or b""
            if not rest:
                return _join(chunks)
            frames += 1
            decompressor = frame.LZ4FrameDecompressor()
        elif decompressor.needs_input:
            raise _damaged("lz4", "it ends too early")
    raise _damaged("lz4", f"it has more than {MAX_FRAMES} frames")


def _compress_zstd(buf: Buffer, level: int | None) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    return zstd.compress(buf, level)


def _decompress_zstd(buf: Buffer, limit_bytes: int) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
    frames: list[bytes] = []
    room = limit_bytes
    rest = buf
    for _ in range(MAX_FRAMES):
        decompressor = zstd.ZstdDecompressor(options=options)
        try:
            frame = decompressor.decompress(rest, room + 1)
        except zstd.ZstdError as error:
            raise _damaged("zstd", str(error)) from error
        room -= len(frame)
        if room < 0:
            raise _too_large(limit_bytes)
        if not decompressor.eof:
            raise _damaged("zstd", "it ends too early")
        frames.append(frame)
        rest = decompressor.unused_data
        if not rest:
            return _join(frames)
    raise _damaged("zstd", f"it has more than {MAX_FRAMES} frames")


def _join(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit_bytes: int) -> InvalidBatch:
    return InvalidBatch(
        ErrorCode.MESSAGE_TOO_LARGE, f"the batch holds more than {limit_bytes} bytes; send smaller ones"
    )


def _damaged(codec: str, why: str) -> InvalidBatch:
    return InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"the {codec} body of the batch cannot be read: {why}")


def _unknown(codec: int) -> InvalidBatch:
    return InvalidBatch(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression type {codec} is not 0 to 4")
