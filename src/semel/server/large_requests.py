"""Large requests: which of them are read at all, and which Produce is decoded.

Decoding is done on the event loop, and a request of tiny elements costs it half a second for each MB. Only
Produce has a reason to be large, and its size lies in its batches: it can name no more partitions than there
are. So others are refused by their announced size, before room is made for them, and a large Produce has its
partitions counted, batches skipped, before anything is made of it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from semel.errors import ProtocolError
from semel.wire.apis import ApiKey
from semel.wire.primitives import MALFORMED, malformed, read_uvarint, skip_tags

PLAIN_FRAME_BYTES: Final = 4 * 1024 * 1024
"""The largest request that is no Produce: a fetch of 100,000 partitions fits."""
COUNTED_FRAME_BYTES: Final = 128 * 1024
"""A Produce up to this size is decoded as it is: it cannot hold enough to keep the loop."""
MAX_PRODUCED_PARTITIONS: Final = 20_000
"""Topics and partitions in a larger one."""

_FLEXIBLE_SINCE: Final = 9
_BY_ID_SINCE: Final = 13
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_ACKS_AND_TIMEOUT_BYTES: Final = 6
_INDEX_BYTES: Final = 4
_TOPIC_ID_BYTES: Final = 16


def may_be_large(api_key: int) -> bool:
    return api_key == ApiKey.PRODUCE


def check_large_produce(body: memoryview, pos: int, version: int) -> None:
    """Raise ProtocolError if a Produce names more partitions than a client could mean."""
    try:
        if version >= _FLEXIBLE_SINCE:
            _count_flexible(body, pos, version)
        else:
            _count_classic(body, pos)
    except MALFORMED as error:
        raise malformed("ProduceRequest", version, error) from None


def _count_flexible(body: memoryview, pos: int, version: int) -> None:
    length, pos = read_uvarint(body, pos)
    pos += max(length - 1, 0) + _ACKS_AND_TIMEOUT_BYTES
    topics, pos = read_uvarint(body, pos)
    total = _checked(topics - 1)
    for _ in range(topics - 1):
        length = _TOPIC_ID_BYTES + 1
        if version < _BY_ID_SINCE:
            length, pos = read_uvarint(body, pos)
        partitions, pos = read_uvarint(body, pos + max(length - 1, 0))
        total = _checked(total + partitions - 1)
        for _ in range(partitions - 1):
            length, pos = read_uvarint(body, pos + _INDEX_BYTES)
            pos += max(length - 1, 0)
            pos = skip_tags(body, pos + 1, body[pos])
        pos = skip_tags(body, pos + 1, body[pos])


def _count_classic(body: memoryview, pos: int) -> None:
    pos += 2 + max(_INT16.unpack_from(body, pos)[0], 0) + _ACKS_AND_TIMEOUT_BYTES
    topics = _INT32.unpack_from(body, pos)[0]
    pos += 4
    total = _checked(topics)
    for _ in range(topics):
        pos += 2 + max(_INT16.unpack_from(body, pos)[0], 0)
        partitions = _INT32.unpack_from(body, pos)[0]
        pos += 4
        total = _checked(total + partitions)
        for _ in range(partitions):
            pos += _INDEX_BYTES
            pos += 4 + max(_INT32.unpack_from(body, pos)[0], 0)


def _checked(total: int) -> int:
    if total > MAX_PRODUCED_PARTITIONS:
        raise ProtocolError(
            f"a Produce names {total} topics and partitions or more; {MAX_PRODUCED_PARTITIONS} are allowed"
        )
    return total
