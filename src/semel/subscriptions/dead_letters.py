"""Dead letters: where they go, what they tell of their origin, and the way back.

A dead letter is the record as it was, with headers that say where it came from, how often it failed and why.
`redrive` makes a record for its origin of it again, for the group that gave it up: subscriptions of other
groups pass over such a record, since they have had the original.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.wire.records import Headers, Record

TOPIC: Final = "semel.dead.topic"
PARTITION: Final = "semel.dead.partition"
OFFSET: Final = "semel.dead.offset"
GROUP: Final = "semel.dead.group"
ATTEMPTS: Final = "semel.dead.attempts"
CAUSE: Final = "semel.dead.cause"
TIMESTAMP: Final = "semel.dead.timestamp"
REDRIVEN_FOR: Final = "semel.redriven.for"
DEAD_PREFIX: Final = "semel.dead."
UNKNOWN_CAUSE: Final = "its process died"
MAX_CAUSE_CHARACTERS: Final = 1_000
_LEGAL_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Origin(NamedTuple):
    """Where a dead letter came from."""

    where: TopicPartition
    offset: int
    group_id: str


def dead_letter_topic(given: str | None, topic: str, group_id: str) -> str:
    """The topic for dead letters: `TOPIC.GROUP.dead`, unless one was named."""
    name = given or f"{topic}.{group_id}.dead"
    if not _LEGAL_TOPIC.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a topic, so name one for dead letters (dead_letter_topic)"
        )
    return name


def dead_letter_headers(
    record: Record, where: TopicPartition, group_id: str, attempts: int, cause: str
) -> list[tuple[str, bytes | None]]:
    kept = [header for header in record.headers if not header[0].startswith(DEAD_PREFIX)]
    return [
        *kept,
        (TOPIC, where.topic.encode()),
        (PARTITION, b"%d" % where.partition),
        (OFFSET, b"%d" % record.offset),
        (TIMESTAMP, b"%d" % record.timestamp),
        (GROUP, group_id.encode()),
        (ATTEMPTS, b"%d" % attempts),
        (CAUSE, (cause or UNKNOWN_CAUSE)[:MAX_CAUSE_CHARACTERS].encode()),
    ]


def origin_of(headers: Headers) -> Origin | None:
    """Where a record came from, if it is a dead letter."""
    found = dict(headers)
    try:
        return Origin(
            TopicPartition(_text(found, TOPIC), int(_text(found, PARTITION))),
            int(_text(found, OFFSET)),
            _text(found, GROUP),
        )
    except (KeyError, ValueError):
        return None


def redriven_headers(headers: Headers, group_id: str) -> Sequence[tuple[str, bytes | None]]:
    """The headers of a record on its way back."""
    kept = [
        header for header in headers if not header[0].startswith(DEAD_PREFIX) and header[0] != REDRIVEN_FOR
    ]
    return [*kept, (REDRIVEN_FOR, group_id.encode())]


def is_for_another(record: Record, group_id: str) -> bool:
    """Whether a record was redriven for another group, which alone had not handled it."""
    for name, value in record.headers:
        if name == REDRIVEN_FOR:
            return value is not None and value != group_id.encode()
    return False


def _text(headers: dict[str, bytes | None], name: str) -> str:
    value = headers[name]
    if value is None:
        raise ValueError(name)
    return value.decode()
