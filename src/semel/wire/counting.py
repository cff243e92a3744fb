"""Counting what a request names, without making anything of it.

A request of tiny elements costs far more to decode and to answer than its bytes say. So the elements of all
arrays of a large one are counted first, in a walk over its lengths that ends when there are too many.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from struct import Struct
from typing import Final

from semel.errors import ProtocolError
from semel.wire.apis import APIS
from semel.wire.primitives import MALFORMED, malformed, read_uvarint, skip_tags

_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")


class Kind(IntEnum):
    """What a field is; plurals are arrays."""

    NUMBER = 0
    STRING = 1
    BYTES = 2
    STRUCT = 3
    OPTIONAL_STRUCT = 4
    NUMBERS = 5
    STRINGS = 6
    STRUCTS = 7


class Field:
    """A field, or a run of numbers: in which versions it is there, and what it is made of."""

    __slots__ = ("fields", "first", "kind", "last", "size")

    def __init__(
        self, first: int, last: int, kind: Kind, size: int = 0, fields: tuple[Field, ...] = ()
    ) -> None:
        self.first = first
        self.last = last
        self.kind = kind
        self.size = size
        """Bytes of a number."""
        self.fields = fields
        """Of a struct."""


def check_elements(buf: memoryview, pos: int, api_key: int, version: int, limit: int) -> int:
    """Where the request at `pos` ends. ProtocolError if its arrays have more elements in all than `limit`."""
    api = APIS[api_key]
    walk = _Walk(buf, pos, limit, is_flexible=version >= api.flexible_from)
    try:
        return walk.over(_fields_of(api_key, version))
    except MALFORMED as error:
        raise malformed(f"{api.name}Request", version, error) from None
    except _TooMany:
        raise ProtocolError(
            f"a {api.name} request of {len(buf)} bytes names more than {limit} things; "
            "ask for fewer at a time, or raise max.partitions if there are so many"
        ) from None


class _TooMany(Exception):  # noqa: N818 - what was found, not what went wrong
    pass


class _Walk:
    """Where a walk has come to, and how many elements it may still meet."""

    __slots__ = ("_buf", "_is_flexible", "_left", "_pos")

    def __init__(self, buf: memoryview, pos: int, limit: int, *, is_flexible: bool) -> None:
        self._buf = buf
        self._pos = pos
        self._left = limit
        self._is_flexible = is_flexible

    def over(self, fields: tuple[Field, ...]) -> int:
        for field in fields:
            kind = field.kind
            if kind == Kind.NUMBER:
                self._pos += field.size
            elif kind == Kind.STRING:
                self._skip(_INT16)
            elif kind == Kind.BYTES:
                self._skip(_INT32)
            elif kind == Kind.STRUCT:
                self.over(field.fields)
            elif kind == Kind.OPTIONAL_STRUCT:
                self._over_optional(field)
            else:
                self._over_array(field)
        if self._is_flexible:
            pos = self._pos
            self._pos = skip_tags(self._buf, pos + 1, self._buf[pos])
        return self._pos

    def _over_optional(self, field: Field) -> None:
        is_there = self._buf[self._pos] < 128  # A signed byte: -1 says that it is not.
        self._pos += 1
        if is_there:
            self.over(field.fields)

    def _over_array(self, field: Field) -> None:
        count = self._length(_INT32)
        self._left -= count
        if self._left < 0:
            raise _TooMany
        if field.kind == Kind.NUMBERS:
            self._pos += count * field.size
        elif field.kind == Kind.STRINGS:
            for _ in range(count):
                self._skip(_INT16)
        else:
            for _ in range(count):
                self.over(field.fields)

    def _skip(self, classic: Struct) -> None:
        """Pass over what follows its length."""
        length = self._length(classic)
        self._pos += length

    def _length(self, classic: Struct) -> int:
        """A length or a count, 0 for null; whether it may be negative is left to the decoder."""
        if self._is_flexible:
            length, self._pos = read_uvarint(self._buf, self._pos)
            return max(length - 1, 0)
        length = int(classic.unpack_from(self._buf, self._pos)[0])
        self._pos += classic.size
        return max(length, 0)


@cache
def _fields_of(api_key: int, version: int) -> tuple[Field, ...]:
    """The fields that a request has in this version, runs of numbers joined."""
    from semel.wire.shapes import REQUESTS  # It needs this module, and only large requests need it.

    return _present(REQUESTS[api_key], version)


def _present(fields: tuple[Field, ...], version: int) -> tuple[Field, ...]:
    present: list[Field] = []
    for field in fields:
        if not field.first <= version <= field.last:
            continue
        size = field.size
        if field.kind == Kind.NUMBER and present and present[-1].kind == Kind.NUMBER:
            size += present.pop().size
        present.append(Field(version, version, field.kind, size, _present(field.fields, version)))
    return tuple(present)
