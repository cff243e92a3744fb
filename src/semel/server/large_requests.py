"""Large requests: which of them are read at all, and which are decoded.

Requests are decoded and decided on the event loop, and those of tiny elements cost it seconds for each MB.
Only Produce has a reason to be large, and its size lies in its batches. So others are refused by their
announced size, before room is made for them. And no request has a reason to name more than all partitions
that there may be, each with its topic: what a larger one names is counted before anything is made of it.
"""

from __future__ import annotations

from typing import Final

from semel.wire.apis import ApiKey

PLAIN_FRAME_BYTES: Final = 4 * 1024 * 1024
"""The largest request that is no Produce: a fetch of all partitions that there may be fits several times."""
COUNTED_FRAME_BYTES: Final = 64 * 1024
"""A request up to this size is decoded as it is: it cannot name enough to keep the loop."""
OTHER_ELEMENTS: Final = 10_000
"""What a request may name besides all partitions and their topics: groups, members, settings."""


def may_be_large(api_key: int) -> bool:
    return api_key == ApiKey.PRODUCE


def most_elements(max_partitions: int) -> int:
    """How much a request may name, on a broker that holds so many partitions."""
    return 2 * max_partitions + OTHER_ELEMENTS
