"""Which partition a key belongs to: Kafka's murmur2, so that every client puts a key in the same place.

The hash is MurmurHash2 with 32 bits and the seed that Kafka's clients use; the partition is its lower 31 bits
modulo the number of partitions. One key at a time, or a whole column with numpy, which is loaded only then.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from semel.wire.columns import BinaryColumn, Bools, Bytes, Ints, Words

SEED: Final = 0x9747B28C
MULTIPLIER: Final = 0x5BD1E995
ROTATION: Final = 24
MASK: Final = 0xFFFFFFFF
POSITIVE: Final = 0x7FFFFFFF
NO_PARTITION: Final = -1
# A column is hashed four bytes of every key at a time; the few keys longer than this are hashed one by one.
MAX_COLUMN_KEY_BYTES: Final = 256


def murmur2(key: bytes) -> int:
    """The hash of `key`, from 0 to 2^32 - 1 (Java shows the upper half as negative numbers)."""
    length = len(key)
    hashed = SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        word = int.from_bytes(key[i : i + 4], "little") * MULTIPLIER & MASK
        word = (word ^ word >> ROTATION) * MULTIPLIER & MASK
        hashed = (hashed * MULTIPLIER & MASK) ^ word
    if whole < length:
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * MULTIPLIER & MASK
    hashed = (hashed ^ hashed >> 13) * MULTIPLIER & MASK
    return hashed ^ hashed >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    """The partition, of `partition_count`, that records with this key go to."""
    return (murmur2(key) & POSITIVE) % partition_count


def murmur2_column(keys: "BinaryColumn") -> "Words":
    """The hash of every key; that of an empty one for nulls."""
    import numpy as np

    lengths = keys.lengths()
    long_rows = np.flatnonzero(lengths > MAX_COLUMN_KEY_BYTES)
    lengths[long_rows] = 0
    starts = keys.offsets[:-1]
    hashed: Words = (lengths ^ SEED).astype(np.uint32)
    word_counts = lengths >> 2
    for i in range(int(word_counts.max(initial=0))):
        rows = _rows_where(word_counts > i)
        word = _words_at(keys.buffer, starts[rows] + 4 * i) * np.uint32(MULTIPLIER)
        word = (word ^ (word >> np.uint32(ROTATION))) * np.uint32(MULTIPLIER)
        hashed[rows] = (hashed[rows] * np.uint32(MULTIPLIER)) ^ word
    _mix_tails(hashed, keys.buffer, starts, lengths)
    hashed = (hashed ^ (hashed >> np.uint32(13))) * np.uint32(MULTIPLIER)
    hashed ^= hashed >> np.uint32(15)
    for row in long_rows.tolist():
        hashed[row] = murmur2(keys.buffer[int(starts[row]) : int(keys.offsets[row + 1])].tobytes())
    return hashed


def partition_column(keys: "BinaryColumn", partition_count: int) -> "Ints":
    """The partition of every key; NO_PARTITION for nulls, which the caller may spread as it likes."""
    import numpy as np

    partitions = (murmur2_column(keys) & POSITIVE).astype(np.int64) % partition_count
    if keys.valid is not None:
        partitions[~keys.valid] = NO_PARTITION
    return partitions


def _rows_where(chosen: "Bools") -> "Ints | slice":
    """Their indexes; all of them as a slice, which copies nothing: keys are often of one length."""
    import numpy as np

    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _words_at(buffer: "Bytes", at: "Ints") -> "Words":
    """The four bytes at each place as one number, the first byte lowest."""
    import numpy as np

    # A word begins at every byte of this view; items of type void need no alignment.
    words = np.ndarray((len(buffer) - 3,), "V4", buffer, strides=(1,))
    return words[at].view("<u4")


def _mix_tails(hashed: "Words", buffer: "Bytes", starts: "Ints", lengths: "Ints") -> None:
    """The one to three bytes after the last whole word, for keys that have them."""
    import numpy as np

    tails = lengths & 3
    ends = starts + (lengths & ~3)
    for i in (2, 1, 0):
        rows = _rows_where(tails > i)
        hashed[rows] ^= buffer[ends[rows] + i].astype(np.uint32) << np.uint32(8 * i)
    rows = _rows_where(tails > 0)
    hashed[rows] *= np.uint32(MULTIPLIER)
