"""The primitive types of Kafka's protocol: what the generated messages are made of.

Decoding never trusts a length. Array counts are checked against the bytes left before anything is
allocated. Strings and bytes are sliced without a check: a slice past the end is merely short, and it
moves the position past the end, so that the next read fails, or the message's own last check does. Each
message turns all of that into a `DecodeError`; nothing else leaves a decoder, whatever the bytes.

Encoding appends to one bytearray. Record sets are the exception: a large one is not copied, its place
is noted in `splices` and the frame is put together around it (see `semel.wire.frames`).
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sized
from struct import Struct
from typing import Any, ClassVar, Final, TypeAlias

from semel.compilation import mypyc_attr
from semel.errors import ProtocolError, SemelError

RecordsField: TypeAlias = Sized
"""A record set: bytes, a memoryview, or any region that knows its length and is sent by other means."""

Splices: TypeAlias = list[tuple[int, RecordsField]]
"""Where, in the encoded bytes, record sets belong that were not copied into them."""

SPLICE_MIN_BYTES: Final = 512
"""Shorter record sets are copied: one more buffer in a write costs more than that."""

ZERO_UUID: Final = bytes(16)
"""Kafka's "no id"."""

MAX_UNKNOWN_TAGS: Final = 100
"""Tagged fields that are passed over in one struct. Real ones are a handful, and each costs time."""

NEVER: Final = 32767
"""The first flexible version of an API that has none."""


NEW_LIST: Final[list[Any]] = []
"""The default of array arguments: stands for a new list each time."""


class DecodeError(ProtocolError):
    """Bytes that are not what they claim to be."""


class EncodeError(SemelError):
    """A message holds a value that its type or version cannot carry: a bug of the caller."""


MALFORMED: Final = (IndexError, struct.error, UnicodeDecodeError)
"""What reading past the end, or text that is not UTF-8, raises inside a decoder."""

UNENCODABLE: Final = (AttributeError, TypeError, ValueError, struct.error)
"""What a value of a wrong type or size raises inside an encoder."""


@mypyc_attr(allow_interpreted_subclasses=True)  # most messages are not compiled
class MessageStruct:  # noqa: PLW1641 - messages change, so they have no hash
    """What the generated classes share. They are no dataclasses: making those takes a millisecond each at
    start, and mypyc cannot compile their constants."""

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.FIELDS)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.FIELDS)
        return f"{type(self).__name__}({values})"


# Refusals: functions that make errors, so that the generated code stays one line each.


def malformed(message: str, version: int, error: Exception) -> DecodeError:
    if isinstance(error, UnicodeDecodeError):
        return DecodeError(f"{message} v{version}: a string is not UTF-8 ({error.reason})")
    return ended_early(message, version)


def ended_early(message: str, version: int) -> DecodeError:
    return DecodeError(f"{message} v{version}: the bytes end before the message does")


def unencodable(message: str, version: int, error: Exception) -> EncodeError:
    return EncodeError(f"{message} v{version} cannot be encoded: {error}")


def null_refused(field: str, version: int) -> DecodeError:
    return DecodeError(f"{field} is null, which v{version} does not allow")


def null_unencodable(field: str, version: int) -> EncodeError:
    return EncodeError(f"{field} is None, which v{version} cannot carry")


def length_refused(field: str, length: int) -> DecodeError:
    return DecodeError(f"{field} has the length {length}")


def count_refused(field: str, count: int, bytes_left: int) -> DecodeError:
    if count == -1:
        return DecodeError(f"{field} is null, which this version does not allow")
    return DecodeError(f"{field} claims {count} elements where {max(bytes_left, 0)} bytes are left")


def tag_size_refused(struct_name: str, tag: int) -> DecodeError:
    return DecodeError(f"{struct_name}: tagged field {tag} does not end where its size says")


# Reading.

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_unpack_int16 = _INT16.unpack_from
_pack_int16 = _INT16.pack
_pack_int32 = _INT32.pack
# Lists of partitions and of replicas are short and everywhere.
_SHORT_INT32S_END = 8
_SHORT_INT32S = [Struct(f">{count}i") for count in range(_SHORT_INT32S_END)]


def uvarint_tail(buf: memoryview, pos: int, value: int) -> tuple[int, int]:
    """Finish an unsigned varint whose first byte, `value`, has its high bit set."""
    byte = buf[pos]
    value = value & 0x7F | (byte & 0x7F) << 7
    if byte < 0x80:
        return value, pos + 1
    byte = buf[pos + 1]
    value |= (byte & 0x7F) << 14
    if byte < 0x80:
        return value, pos + 2
    byte = buf[pos + 2]
    value |= (byte & 0x7F) << 21
    if byte < 0x80:
        return value, pos + 3
    byte = buf[pos + 3]
    if byte > 0x0F:
        raise DecodeError("a varint has more than 32 bits")
    return value | byte << 28, pos + 4


def read_uvarint(buf: memoryview, pos: int) -> tuple[int, int]:
    value = buf[pos]
    if value < 0x80:
        return value, pos + 1
    return uvarint_tail(buf, pos + 1, value)


def read_tag(buf: memoryview, pos: int, previous: int) -> tuple[int, int, int]:
    """The tag, the start and the end of a tagged field; tags must ascend, fields must fit."""
    tag, pos = read_uvarint(buf, pos)
    if tag <= previous:
        raise DecodeError(f"tagged field {tag} comes after {previous}: tags must ascend")
    size, pos = read_uvarint(buf, pos)
    if size > len(buf) - pos:
        raise DecodeError(f"tagged field {tag} claims {size} bytes where {len(buf) - pos} are left")
    return tag, pos, pos + size


def skip_tags(buf: memoryview, pos: int, count: int) -> int:
    """Pass over `count` tagged fields, none of them known; `count` may still be a varint's first byte."""
    if count >= 0x80:
        count, pos = uvarint_tail(buf, pos, count)
    if count > MAX_UNKNOWN_TAGS:
        raise DecodeError(f"{count} tagged fields where none is known; {MAX_UNKNOWN_TAGS} are allowed")
    tag = -1
    for _ in range(count):
        tag, _start, pos = read_tag(buf, pos, tag)
    return pos


def read_int8s(buf: memoryview, pos: int, count: int) -> list[int]:
    return list(struct.unpack_from(f">{count}b", buf, pos))


def read_int32s(buf: memoryview, pos: int, count: int) -> list[int]:
    if count < _SHORT_INT32S_END:
        return list(_SHORT_INT32S[count].unpack_from(buf, pos))
    return list(struct.unpack_from(f">{count}i", buf, pos))


def read_int64s(buf: memoryview, pos: int, count: int) -> list[int]:
    return list(struct.unpack_from(f">{count}q", buf, pos))


def read_strings(buf: memoryview, pos: int, count: int, field: str) -> tuple[list[str], int]:
    strings: list[str] = []
    for _ in range(count):
        length: int = _unpack_int16(buf, pos)[0]
        if length < 0:
            raise length_refused(field, length)
        pos += 2
        strings.append(buf[pos : pos + length].tobytes().decode())
        pos += length
    return strings, pos


def read_compact_strings(buf: memoryview, pos: int, count: int, field: str) -> tuple[list[str], int]:
    strings: list[str] = []
    for _ in range(count):
        length, pos = read_uvarint(buf, pos)
        if length == 0:
            raise length_refused(field, -1)
        end = pos + length - 1
        strings.append(buf[pos:end].tobytes().decode())
        pos = end
    return strings, pos


# Writing.


def write_uvarint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_string(out: bytearray, value: str) -> None:
    raw = value.encode()
    out += _pack_int16(len(raw))
    out += raw


def write_nullable_string(out: bytearray, value: str | None) -> None:
    if value is None:
        out += b"\xff\xff"
    else:
        write_string(out, value)


def write_compact_string(out: bytearray, value: str) -> None:
    raw = value.encode()
    length = len(raw) + 1
    if length < 0x80:
        out.append(length)
    else:
        write_uvarint(out, length)
    out += raw


def write_nullable_compact_string(out: bytearray, value: str | None) -> None:
    if value is None:
        out.append(0)
    else:
        write_compact_string(out, value)


def write_bytes(out: bytearray, value: bytes) -> None:
    out += _pack_int32(len(value))
    out += value


def write_nullable_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += b"\xff\xff\xff\xff"
    else:
        write_bytes(out, value)


def write_compact_bytes(out: bytearray, value: bytes) -> None:
    write_uvarint(out, len(value) + 1)
    out += value


def write_nullable_compact_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(0)
    else:
        write_compact_bytes(out, value)


def write_nullable_records(out: bytearray, value: RecordsField | None, splices: Splices) -> None:
    if value is None:
        out += b"\xff\xff\xff\xff"
    else:
        out += _pack_int32(len(value))
        _place_records(out, value, splices)


def write_nullable_compact_records(out: bytearray, value: RecordsField | None, splices: Splices) -> None:
    if value is None:
        out.append(0)
    else:
        write_uvarint(out, len(value) + 1)
        _place_records(out, value, splices)


def _place_records(out: bytearray, value: RecordsField, splices: Splices) -> None:
    if len(value) < SPLICE_MIN_BYTES and isinstance(value, (bytes, bytearray, memoryview)):
        out += value
    else:
        splices.append((len(out), value))


def write_int8s(out: bytearray, values: list[int]) -> None:
    out += struct.pack(f">{len(values)}b", *values)


def write_int32s(out: bytearray, values: list[int]) -> None:
    count = len(values)
    if count < _SHORT_INT32S_END:
        out += _SHORT_INT32S[count].pack(*values)
    else:
        out += struct.pack(f">{count}i", *values)


def write_int64s(out: bytearray, values: list[int]) -> None:
    out += struct.pack(f">{len(values)}q", *values)


def write_strings(out: bytearray, values: list[str]) -> None:
    for value in values:
        write_string(out, value)


def write_compact_strings(out: bytearray, values: list[str]) -> None:
    for value in values:
        write_compact_string(out, value)


def write_tags(out: bytearray, tagged: list[tuple[int, bytearray]]) -> None:
    """Write tagged fields, given in ascending order of their tags."""
    write_uvarint(out, len(tagged))
    for tag, content in tagged:
        write_uvarint(out, tag)
        write_uvarint(out, len(content))
        out += content


# Ids.


def uuid_text(uuid: bytes) -> str:
    """The way Kafka prints ids: base64url without padding."""
    return urlsafe_b64encode(uuid).decode().rstrip("=")


def uuid_from_text(text: str) -> bytes:
    try:
        uuid = urlsafe_b64decode(text + "==")
    except ValueError:
        uuid = b""
    if len(uuid) != len(ZERO_UUID):
        raise ProtocolError(f"{text!r} is not an id: expected 22 characters of base64url")
    return uuid
