"""`semel consume`: the records of a topic as text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO, Final

import click

from semel.cli.formats import Render, parse_format
from semel.cli.options import bootstrap_option, complete_topic, run_with_cluster
from semel.client.admin import READ_COMMITTED, READ_UNCOMMITTED
from semel.client.cluster import Cluster
from semel.client.consumer import BEGINNING, END, Consumer, ConsumerOptions, FetchedBatch, Start
from semel.client.errors import broker_error
from semel.client.metadata import TopicPartition
from semel.wire.errors import ErrorCode

ISOLATION: Final = {"read_committed": READ_COMMITTED, "read_uncommitted": READ_UNCOMMITTED}
POLL_MS: Final = 1_000


@dataclass(slots=True, frozen=True)
class Wanted:
    """What to read, and when to stop."""

    topic: str
    partitions: Sequence[int]
    start: Start
    max_records: int | None
    exit_at_end: bool


def parse_start(text: str) -> Start:
    """Reads `beginning`, `end`, an offset, or `@` and a time: milliseconds or ISO 8601."""
    if text == "beginning":
        return BEGINNING
    if text == "end":
        return END
    if text.isascii() and text.isdigit():
        return Start(offset=int(text))
    if text.startswith("@"):
        return Start(timestamp_ms=_parse_time(text[1:]))
    raise click.BadParameter(f"{text!r} is none of: beginning, end, an offset, or @ and a time")


def _parse_time(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: write milliseconds since 1970, or 2026-11-16T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _start(ctx: click.Context, param: click.Parameter, text: str) -> Start:
    return parse_start(text)


@click.command
@click.argument("topic", shell_complete=complete_topic)
@click.option(
    "--format",
    "-f",
    "form",
    default="raw",
    show_default=True,
    metavar="FORMAT",
    help="raw (value and newline), json, or a template of %k %v %o %p %t %T %h.",
)
@click.option(
    "--from",
    "start",
    default="beginning",
    show_default=True,
    callback=_start,
    metavar="PLACE",
    help="beginning, end, an offset, or @TIME (milliseconds, or ISO 8601, in UTC unless it says otherwise).",
)
@click.option(
    "--isolation",
    type=click.Choice(list(ISOLATION)),
    default="read_committed",
    show_default=True,
    help="Whether records of open and aborted transactions are shown.",
)
@click.option(
    "--partition",
    "-p",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only these; may be repeated.",
)
@click.option("--max", "-n", "max_records", type=click.IntRange(min=1), help="Stop after so many records.")
@click.option("--exit-at-end", "-e", is_flag=True, help="Stop where the topic ended when we began.")
@bootstrap_option
def command(
    topic: str,
    form: str,
    start: Start,
    isolation: str,
    partitions: tuple[int, ...],
    max_records: int | None,
    exit_at_end: bool,
    bootstrap: str,
) -> None:
    """Print the records of TOPIC, and go on until interrupted.

    In a template %k is the key, %v the value, %o the offset, %p the partition, %t the topic, %T the
    timestamp in milliseconds, %h the headers; %% is a percent sign; \\n, \\t, \\r, \\0, \\\\ and \\xFF
    are bytes. A null key or value prints as nothing; json tells them apart.

    \b
    semel consume orders --format '%p/%o %k=%v\\n' --exit-at-end
    semel consume orders --from @2026-11-16T12:00:00Z --format json
    """
    wanted = Wanted(topic, partitions, start, max_records, exit_at_end)
    options = ConsumerOptions(isolation_level=ISOLATION[isolation])
    run_with_cluster(bootstrap, partial(_consume, wanted, parse_format(form), options))


async def _consume(wanted: Wanted, render: Render, options: ConsumerOptions, cluster: Cluster) -> None:
    async with Consumer(cluster, options) as consumer:
        if wanted.partitions:
            partitions = [TopicPartition(wanted.topic, each) for each in dict.fromkeys(wanted.partitions)]
        else:
            partitions = await consumer.partitions_of(wanted.topic)
        await consumer.assign(partitions, wanted.start)
        ends = await consumer.end_offsets() if wanted.exit_at_end else None
        _refuse_past(consumer, ends or {})
        left = sys.maxsize if wanted.max_records is None else wanted.max_records
        while left > 0 and not (ends is not None and _is_past(consumer, ends)):
            batches = await consumer.poll(POLL_MS)
            left -= _print(batches, render, left, ends, sys.stdout.buffer)


def _refuse_past(consumer: Consumer, ends: dict[TopicPartition, int]) -> None:
    for where, end in ends.items():
        if consumer.position(where) > end:
            reason = f"it ends at {end}"
            what = f"{where} cannot be read at offset {consumer.position(where)}"
            raise broker_error(ErrorCode.OFFSET_OUT_OF_RANGE, what, reason)


def _is_past(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    return all(consumer.position(where) >= end for where, end in ends.items())


def _print(
    batches: Sequence[FetchedBatch],
    render: Render,
    max_records: int,
    ends: dict[TopicPartition, int] | None,
    out: BinaryIO,
) -> int:
    """Prints at most so many records, none past the ends; returns how many."""
    printed = 0
    for batch in batches:
        end = sys.maxsize if ends is None else ends[batch.where]
        for record in batch.records():
            if printed == max_records or record.offset >= end:
                break
            out.write(render(batch.where, record))
            printed += 1
    out.flush()
    return printed
