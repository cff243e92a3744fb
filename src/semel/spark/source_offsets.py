"""Offsets of many partitions: as JSON in Spark's checkpoint, as limits of a batch, as ranges for tasks.

The JSON is what Spark's own Kafka source writes, `{"orders":{"0":12,"1":7}}`, with topics and partitions in
order: equal offsets are equal text. All offsets are ends: the offset that is read next.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from semel.client.admin import EARLIEST, LATEST
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError

Offsets: TypeAlias = dict[TopicPartition, int]
OffsetsJson: TypeAlias = dict[str, dict[str, int]]

# What -2 and -1 mean in the offsets that a user gives, as with Spark's own source.
SYMBOLIC_OFFSETS: Final = frozenset({EARLIEST, LATEST})


@dataclass(slots=True, frozen=True)
class OffsetRange:
    """Records of one partition, from `start` up to but not including `end`."""

    where: TopicPartition
    start: int
    end: int


def to_json(offsets: Mapping[TopicPartition, int]) -> OffsetsJson:
    topics: OffsetsJson = {}
    for where in sorted(offsets):
        topics.setdefault(where.topic, {})[str(where.partition)] = offsets[where]
    return topics


def from_json(topics: object) -> Offsets:
    """The offsets of a checkpoint, or those that a user gave; ConfigError where they are something else."""
    if not isinstance(topics, dict):
        raise _no_offsets(topics)
    offsets: Offsets = {}
    for topic, partitions in topics.items():
        if not isinstance(partitions, dict):
            raise _no_offsets(topics)
        for partition, offset in partitions.items():
            number = isinstance(offset, int) and not isinstance(offset, bool)
            if (
                not number
                or not str(partition).isdecimal()
                or (offset < 0 and offset not in SYMBOLIC_OFFSETS)
            ):
                raise _no_offsets(topics)
            offsets[TopicPartition(topic, int(partition))] = offset
    return offsets


def parse(text: str) -> Offsets:
    """Offsets as a user writes them."""
    try:
        return from_json(json.loads(text))
    except ValueError:
        raise _no_offsets(text) from None


def of_source(given: object) -> Offsets | None:
    """The offsets that Spark tells of a source, as text or taken apart; None if they are not of topics."""
    try:
        return parse(given) if isinstance(given, str) else from_json(given)
    except ConfigError:
        return None


def _no_offsets(given: object) -> ConfigError:
    return ConfigError(
        f"{given!r} are no offsets: say earliest, latest, or "
        '{"TOPIC": {"PARTITION": OFFSET, ...}}, where -2 is the earliest and -1 the latest'
    )


def batch_end(
    start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], most: int
) -> Offsets:
    """Where a batch of about `most` offsets ends: each partition gets its share of what is waiting.

    Whoever has something gets one offset at least, or a small partition would wait for a large one forever.
    """
    waiting = {where: max(end - start.get(where, 0), 0) for where, end in latest.items()}
    total = sum(waiting.values())
    if total <= most:
        return dict(latest)
    ends: Offsets = {}
    for where, end in latest.items():
        share = max(waiting[where] * most // total, min(waiting[where], 1))
        ends[where] = end if waiting[where] <= share else start.get(where, 0) + share
    return ends


def split(ranges: Iterable[OffsetRange], at_least: int) -> list[OffsetRange]:
    """The ranges, the large ones in pieces, so that there are about as many as asked for."""
    whole = list(ranges)
    total = sum(each.end - each.start for each in whole)
    if len(whole) >= at_least or not total:
        return whole
    pieces: list[OffsetRange] = []
    for each in whole:
        size = each.end - each.start
        count = max(round(size * at_least / total), 1)
        bounds = [each.start + size * i // count for i in range(count + 1)]
        pieces += [OffsetRange(each.where, start, end) for start, end in pairwise(bounds) if start < end]
    return pieces
