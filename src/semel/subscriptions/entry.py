"""The entry of a partition: what its owner commits, as an offset and a note of at most 4,096 bytes.

The offset is the lowest that is not acknowledged. The note holds the rest: `semel1 ` and base64url, without
padding, of varints in this order:

    slots, max_in_flight, flags (1: released), suspect_end - offset (0: no suspects),
    then ranges of offsets, in order: gap since the last (or since the offset), length, mark

Mark 0 stands for acknowledged; 2n for failed n times; 2n + 1 for failed n times and out alone at the moment.
A note that does not begin like this is another tool's: the offset is all that is known then.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from semel.errors import ConfigError

PREFIX: Final = "semel1 "
NOTE_LIMIT_BYTES: Final = 4_096
SPAN_OFFSETS: Final = 4_096
"""Nothing is dealt that far above the committed offset: gaps and lengths stay small."""
MAX_RANGES: Final = 900
"""Of 3 bytes, except for the few that are longer than 127 offsets, these fit a note."""
MAX_ATTEMPTS: Final = 60
"""A mark with its flag is one byte: seven bits."""
ACKNOWLEDGED: Final = 0
RELEASED: Final = 1
MAX_VARINT_BITS: Final = 63


class Mark(NamedTuple):
    """Offsets that have failed so many times; `is_out` if the process that wrote this had it out alone."""

    start: int
    end: int
    attempts: int
    is_out: bool


@dataclass(slots=True, frozen=True)
class Entry:
    """What is committed for one partition."""

    offset: int
    acknowledged: tuple[tuple[int, int], ...] = ()
    marks: tuple[Mark, ...] = ()
    slots: int = 0
    max_in_flight: int = 0
    is_released: bool = False
    suspect_end: int | None = None

    def note(self) -> str:
        out = bytearray()
        _write(out, self.slots)
        _write(out, self.max_in_flight)
        _write(out, RELEASED if self.is_released else 0)
        _write(out, 0 if self.suspect_end is None else max(0, self.suspect_end - self.offset))
        at = self.offset
        for start, end, mark in self._ranges():
            _write(out, start - at)
            _write(out, end - start)
            _write(out, mark)
            at = end
        return PREFIX + urlsafe_b64encode(out).rstrip(b"=").decode()

    def _ranges(self) -> list[tuple[int, int, int]]:
        ranges = [(start, end, ACKNOWLEDGED) for start, end in self.acknowledged]
        for mark in self.marks:
            value = 2 * min(mark.attempts, MAX_ATTEMPTS) + mark.is_out
            if ranges and ranges[-1][1:] == (mark.start, value):
                ranges[-1] = (ranges[-1][0], mark.end, value)
            else:
                ranges.append((mark.start, mark.end, value))
        ranges.sort()
        return ranges

    def after_crash(self, stable_end: int) -> "Entry":
        """What a new owner makes of it: who was out alone has failed; if nobody was, all are suspects."""
        suspect_end = self.suspect_end
        if not self.is_released and suspect_end is None:
            suspect_end = min(self.offset + SPAN_OFFSETS, stable_end)
        if suspect_end is not None and suspect_end <= self.offset:
            suspect_end = None
        marks = tuple(
            mark._replace(attempts=mark.attempts + mark.is_out, is_out=False) for mark in self.marks
        )
        return replace(self, marks=marks, suspect_end=suspect_end, is_released=False)

    def moved_to(self, offset: int) -> "Entry":
        """The same, for a log that begins only there."""
        return replace(
            self,
            offset=offset,
            acknowledged=tuple((max(start, offset), end) for start, end in self.acknowledged if end > offset),
            marks=tuple(
                mark._replace(start=max(mark.start, offset)) for mark in self.marks if mark.end > offset
            ),
        )


def parse_entry(offset: int, note: str) -> Entry | None:
    """Reads what was committed; None where another tool wrote the note."""
    if not note.startswith(PREFIX):
        return None
    try:
        numbers = _read(note[len(PREFIX) :])
        slots, max_in_flight, flags, suspect_length, *ranges = numbers
        acknowledged, marks = _split(offset, ranges)
    except (ValueError, Base64Error) as error:
        raise ConfigError(
            f"the note of a subscription at offset {offset} cannot be read ({error}): it is damaged, or of a "
            "newer version. To give up what it says, stop the subscribers and set the offset with "
            "`semel group reset`"
        ) from None
    return Entry(
        offset=offset,
        acknowledged=acknowledged,
        marks=marks,
        slots=slots,
        max_in_flight=max_in_flight,
        is_released=bool(flags & RELEASED),
        suspect_end=offset + suspect_length if suspect_length else None,
    )


def _split(offset: int, numbers: list[int]) -> tuple[tuple[tuple[int, int], ...], tuple[Mark, ...]]:
    if len(numbers) % 3:
        raise ValueError("a range is cut off")
    acknowledged: list[tuple[int, int]] = []
    marks: list[Mark] = []
    at = offset
    for index in range(0, len(numbers), 3):
        gap, length, mark = numbers[index : index + 3]
        if not length:
            raise ValueError("a range is empty")
        start, at = at + gap, at + gap + length
        if mark == ACKNOWLEDGED:
            acknowledged.append((start, at))
        else:
            marks.append(Mark(start, at, mark >> 1, bool(mark & 1)))
    return tuple(acknowledged), tuple(marks)


def _write(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _read(text: str) -> list[int]:
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return _read_varints(urlsafe_b64decode(padded))


def _read_varints(encoded: Iterable[int]) -> list[int]:
    numbers: list[int] = []
    value = shift = 0
    for byte in encoded:
        value |= (byte & 127) << shift
        if byte < 128:
            numbers.append(value)
            value = shift = 0
        else:
            shift += 7
            if shift >= MAX_VARINT_BITS:
                raise ValueError("a number is too long")
    if shift:
        raise ValueError("a number is cut off")
    return numbers
