"""What every stock client must be able to do with the broker, in one shape for all of them.

Each client gets an adapter to `StockClient`, so that each claim is written once and holds for all, and what
one client writes can be read by another.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final, Protocol

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
BASE_MS: Final = int(time.time() * 1000) - 3_600_000
"""Timestamps of the test records: recent enough not to be deleted by retention."""
TIMEOUT_S: Final = 30.0
FETCH_WAIT_MS: Final = 10
"""How long a fetch may wait at the end of a log: a client that closes waits for its last one."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(slots=True, frozen=True)
class Record:
    """What a producer sends."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers = ()
    partition: int = 0


@dataclass(slots=True, frozen=True)
class Stored:
    """What a consumer gets."""

    record: Record
    offset: int
    append_time: bool = False


class StockClient(Protocol):
    """A client library, as a test uses it. Every wait inside ends after `TIMEOUT_S`."""

    def create_topic(self, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None: ...

    def delete_topic(self, name: str) -> None: ...

    def topics(self) -> set[str]: ...

    def produce(self, topic: str, records: list[Record], codec: str = "none") -> list[int]:
        """Send with idempotence, wait for all acknowledgements, and return the offsets."""

    def consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        """Read by assignment, from an offset."""

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]: ...

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        """The first offset with a timestamp at or after one, None if there is none."""

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None: ...

    def configs(self, topic: str) -> dict[str, str]: ...

    def alter_config(self, topic: str, name: str, value: str) -> None: ...

    def close(self) -> None: ...


def sample_records(count: int, seed: int = 1) -> list[Record]:
    """Records with all that is special: no key, no value, empty ones, headers twice, in any script."""
    dice = random.Random(seed)
    special = [
        Record(b"key", b"value", BASE_MS),
        Record(None, b"no key", BASE_MS + 1),
        Record(b"no value", None, BASE_MS + 2),
        Record(b"", b"", BASE_MS + 4),
        Record(b"headers", b"v", BASE_MS + 5, (("a", b"1"), ("a", b"2"), ("empty", b""))),
        Record("ключ".encode(), "値".encode(), BASE_MS + 6, (("заголовок", "→".encode()),)),
        Record(bytes(range(256)), bytes(range(256)) * 20, BASE_MS + 7),
    ]
    more = [
        Record(b"%d" % n, dice.randbytes(dice.randrange(200)) * 3, BASE_MS + 8 + n)
        for n in range(count - len(special))
    ]
    return special + more


def at_offsets(records: list[Record], first: int = 0) -> list[Stored]:
    """What a consumer gets of records that lie one after the other."""
    return [Stored(record, first + n) for n, record in enumerate(records)]
