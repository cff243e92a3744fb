"""Rows that cannot become records: named in an error, or kept as dead letters with the reason."""

from typing import Final

import numpy as np
import pyarrow as pa

from semel.client.metadata import TopicPartition
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka.rows import RecordRows
from semel.wire.batch import InvalidBatch
from semel.wire.columns import BinaryColumn, Ints, sizes_alone
from semel.wire.records import Headers

# What a batch takes besides the keys and values of its records, at most, where there are no headers.
OVERHEAD_BYTES: Final = 128
MAX_SHOWN_KEY_CHARACTERS: Final = 60
# A dead letter has these besides what it carries: headers of this sink, and none of the row's.
DEAD_LETTER_OVERHEAD_BYTES: Final = 2_048


class BadRows:
    """The bad ones of a batch: their places in it, and why, in step."""

    __slots__ = ("indexes", "reasons")

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self.reasons: list[str] = []

    def __len__(self) -> int:
        return len(self.indexes)

    def add(self, index: int, reason: str) -> None:
        self.indexes.append(index)
        self.reasons.append(reason)

    def good(self, count: int) -> Ints:
        """The places of all others."""
        return np.delete(np.arange(count, dtype=np.int64), self.indexes)

    def fail(self, rows: RecordRows, numbers: Ints, topic: str | None) -> WriteFailed:
        """The error that names the first of them."""
        index, reason = self.indexes[0], self.reasons[0]
        more = f" ({len(self) - 1} more rows are bad)" if len(self) > 1 else ""
        return WriteFailed(
            f"row {numbers[index]} (key {show_key(rows.keys, index)}) cannot be written to "
            f"{'a topic' if topic is None else f'topic {topic!r}'}: {reason}{more}",
            is_permanent=True,
        )


def unfit(where: TopicPartition, error: InvalidBatch) -> WriteFailed:
    """Rows that are good one by one, and make no record batch together."""
    return WriteFailed(f"rows for {where} make no record batch: {error}", is_permanent=True)


def find_oversize(rows: RecordRows, limit_bytes: int, bad: BadRows) -> None:
    """Adds the rows that no batch can hold."""
    if not len(rows.values):
        return
    longest = _longest(rows.values) + (0 if rows.keys is None else _longest(rows.keys))
    if rows.headers is None and longest + OVERHEAD_BYTES <= limit_bytes:
        return
    sizes = sizes_alone(rows.values, rows.keys, rows.headers)
    for index in np.flatnonzero(sizes > limit_bytes).tolist():
        bad.add(
            index,
            f"as a record it takes {sizes[index]} bytes, and max.message.bytes is {limit_bytes}. "
            "Raise that, or split the row",
        )


def _longest(strings: BinaryColumn) -> int:
    return int(strings.lengths().max(initial=0))


def show_key(keys: BinaryColumn | None, index: int) -> str:
    key = None if keys is None else bytes_at(keys, index)
    if key is None:
        return "none"
    text = repr(key.decode(errors="backslashreplace"))
    return text if len(text) <= MAX_SHOWN_KEY_CHARACTERS else f"{text[:MAX_SHOWN_KEY_CHARACTERS]}..."


def bytes_at(strings: BinaryColumn, index: int) -> bytes | None:
    if strings.valid is not None and not strings.valid[index]:
        return None
    return strings.buffer[int(strings.offsets[index]) : int(strings.offsets[index + 1])].tobytes()


class DeadLetters:
    """Bad rows as records for the dead-letter topic: key and value, as far as they fit, and the reason."""

    __slots__ = ("headers", "keys", "values")

    def __init__(
        self, bad: BadRows, rows: RecordRows, numbers: Ints, origin: Headers, limit_bytes: int
    ) -> None:
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[Headers] = []
        room = limit_bytes - DEAD_LETTER_OVERHEAD_BYTES
        for index, reason in zip(bad.indexes, bad.reasons, strict=True):
            key = None if rows.keys is None else bytes_at(rows.keys, index)
            value = bytes_at(rows.values, index)
            notes = [("semel.reason", reason.encode()), ("semel.row", b"%d" % numbers[index]), *origin]
            if value is not None and len(value) + len(key or b"") > room:
                notes.append(("semel.value.bytes", b"%d" % len(value)))
                value = None  # the one thing that could not be kept
            if key is not None and len(key) > room:
                notes.append(("semel.key.bytes", b"%d" % len(key)))
                key = None
            self.keys.append(key)
            self.values.append(value)
            self.headers.append(notes)

    def columns(self) -> tuple[BinaryColumn, BinaryColumn]:
        """Values and keys."""
        return BinaryColumn.of(self.values), BinaryColumn.of(self.keys)


def take(batch: pa.RecordBatch, indexes: Ints) -> pa.RecordBatch:
    return batch.take(pa.array(indexes))
