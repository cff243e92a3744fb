"""`semel produce`: lines from stdin become records."""

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import click

from semel.cli.formats import InputRecord, parse_json, parse_line
from semel.cli.lines import read_lines
from semel.cli.options import bootstrap_option, complete_topic, parse_assignments, run_with_cluster
from semel.cli.tables import output_option, print_json
from semel.client.cluster import Cluster
from semel.client.producer import ACKS_ALL, Producer, ProducerOptions
from semel.errors import ConfigError
from semel.wire.compression import Codec
from semel.wire.records import Headers

ACKS: Final = {"all": ACKS_ALL, "1": 1, "0": 0}


@dataclass(slots=True, frozen=True)
class Input:
    """How a line becomes a record."""

    is_json: bool
    key_separator: bytes | None
    headers: Headers
    partition: int | None

    def parse(self, line: bytes) -> InputRecord:
        parsed = parse_json(line) if self.is_json else parse_line(line, self.key_separator)
        return InputRecord(
            parsed.key,
            parsed.value,
            (*parsed.headers, *self.headers),
            parsed.partition if self.partition is None else self.partition,
            parsed.timestamp_ms,
        )


@click.command
@click.argument("topic", shell_complete=complete_topic)
@click.option(
    "--format",
    "-f",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Each line is a value, or a JSON object with key, value, headers, partition and timestamp.",
)
@click.option("--key-separator", "-k", metavar="TEXT", help="What parts key and value in a line of text.")
@click.option("--partition", "-p", type=click.IntRange(min=0), help="Send everything to this partition.")
@click.option(
    "--header", "-H", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record."
)
@click.option(
    "--compression",
    "-z",
    type=click.Choice([codec.name.lower() for codec in Codec]),
    default="none",
    show_default=True,
    help="How batches are compressed.",
)
@click.option(
    "--acks",
    type=click.Choice(list(ACKS)),
    default="all",
    show_default=True,
    help="When a batch counts as sent.",
)
@click.option(
    "--linger-ms", type=click.IntRange(min=0), default=5, show_default=True, help="How long batches fill."
)
@click.option("--quiet", "-q", is_flag=True, help="Do not report the number of records.")
@bootstrap_option
@output_option
def command(
    topic: str,
    form: str,
    key_separator: str | None,
    partition: int | None,
    headers: tuple[str, ...],
    compression: str,
    acks: str,
    linger_ms: int,
    quiet: bool,
    bootstrap: str,
    output: str,
) -> None:
    """Send the lines of stdin to TOPIC, one record each.

    \b
    printf 'a:1\\nb:2\\n' | semel produce orders --key-separator :
    semel consume orders --format json --exit-at-end | semel produce copy --format json
    """
    if key_separator is not None and form == "json":
        raise click.UsageError("--key-separator is for lines of text; in JSON the key is a field")
    if key_separator == "":
        raise click.UsageError("--key-separator may not be empty")
    options = ProducerOptions(codec=Codec[compression.upper()], acks=ACKS[acks], linger_ms=linger_ms)
    how = Input(
        is_json=form == "json",
        key_separator=None if key_separator is None else key_separator.encode(),
        headers=[(name, value.encode()) for name, value in parse_assignments(headers).items()],
        partition=partition,
    )
    began = time.monotonic()
    count = run_with_cluster(bootstrap, partial(_produce, topic, how, options))
    elapsed_s = time.monotonic() - began
    if output == "json":
        print_json({"topic": topic, "records": count, "seconds": round(elapsed_s, 3)})
    elif not quiet:
        noun = "record" if count == 1 else "records"
        click.echo(f"{count:,} {noun} in {elapsed_s:.1f} s", err=True)


async def _produce(topic: str, how: Input, options: ProducerOptions, cluster: Cluster) -> int:
    """Sends all lines; returns how many were acknowledged."""
    count = 0
    producer = Producer(cluster, options)
    try:
        async for lines in read_lines(sys.stdin.fileno()):
            for line in lines:
                record = _parse(how, line, count)
                await producer.send(
                    topic,
                    record.value,
                    key=record.key,
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                    headers=record.headers,
                )
                count += 1
    except ConfigError:
        # What came before the bad line is sent, so that the user knows where to go on.
        await producer.flush()
        raise
    finally:
        await producer.close()
    return count


def _parse(how: Input, line: bytes, count: int) -> InputRecord:
    try:
        return how.parse(line)
    except ConfigError as error:
        raise ConfigError(f"line {count + 1} was not sent: {error}; the lines before it were") from None
