"""`semel txn`: see transactions, find those that block readers, and abort them; on Semel and on any Kafka."""

import re
import shlex
import time
from datetime import UTC, datetime
from functools import partial
from typing import Final

import click

from semel.cli.options import bootstrap_option, complete_topic, run_with_cluster
from semel.cli.tables import output_option, print_json, print_table
from semel.cli.txn_recover import recover
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.transaction_admin import (
    ANY_DURATION,
    STATES,
    ActiveProducer,
    BlockingTransaction,
    DescribedTransaction,
    ListedTransaction,
    TransactionAdmin,
    TransactionStats,
)

MILLIS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DURATION: Final = re.compile(r"(\d+)(ms|s|m|h|d)?")
# Twice what a transaction may take by default: the broker aborts others by itself.
DEFAULT_LONGER_THAN: Final = "30m"
TWO_PHASE_ADVICE: Final = (
    "A two-phase transaction may be prepared, and its other half committed elsewhere: let its application "
    "recover (`semel txn recover` does it for `semel.transaction`), and abort it only if it never will."
)


def parse_duration_ms(text: str) -> int:
    """Reads `500ms`, `30s`, `5m`, `1h` or `2d`; a number alone is seconds."""
    match = DURATION.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no duration: write 500ms, 30s, 5m, 1h or 2d")
    return int(match[1]) * MILLIS[match[2] or "s"]


@click.group
def command() -> None:
    """See transactions, find those that block readers, and abort them."""


command.add_command(recover)


@command.command(name="list")
@click.option("--state", "states", multiple=True, metavar="STATE", help=f"Only these: {', '.join(STATES)}.")
@click.option("--producer-id", "producer_ids", multiple=True, type=int, help="Only of these producers.")
@click.option(
    "--longer-than",
    type=parse_duration_ms,
    metavar="DURATION",
    help="Only those open for longer, such as 30s or 5m.",
)
@click.option("--match", metavar="REGEX", help="Only transactional ids that this matches as a whole.")
@bootstrap_option
@output_option
def list_transactions(
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    longer_than: int | None,
    match: str | None,
    bootstrap: str,
    output: str,
) -> None:
    """List transactional ids and the state of each; of open transactions, whether they are two-phase."""
    pattern = _pattern(match)
    duration_ms = ANY_DURATION if longer_than is None else longer_than
    shown, two_phase = run_with_cluster(bootstrap, partial(_list, states, producer_ids, duration_ms, pattern))
    rows = [
        (
            each.transactional_id,
            each.state,
            two_phase.get(each.transactional_id),
            each.producer_id,
            each.coordinator_id,
        )
        for each in shown
    ]
    if output == "json":
        fields = ("transactional_id", "state", "two_phase", "producer_id", "coordinator")
        print_json([dict(zip(fields, row, strict=True)) for row in rows])
    else:
        print_table(("TRANSACTIONAL ID", "STATE", "TWO-PHASE", "PRODUCER ID", "COORDINATOR"), rows)


async def _list(
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    longer_than_ms: int,
    pattern: re.Pattern[str],
    cluster: Cluster,
) -> tuple[list[ListedTransaction], dict[str, bool]]:
    admin = TransactionAdmin(cluster)
    listed = await admin.list_transactions(
        states=states, producer_ids=producer_ids, longer_than_ms=longer_than_ms
    )
    shown = [each for each in listed if pattern.fullmatch(each.transactional_id)]
    return shown, await admin.two_phase_ids(shown)


@command.command
@click.argument("transactional_id")
@bootstrap_option
@output_option
def describe(transactional_id: str, bootstrap: str, output: str) -> None:
    """Show the state, producer and partitions of one TRANSACTIONAL_ID."""
    described = run_with_cluster(bootstrap, partial(_describe, transactional_id))
    fields = _described_json(described)
    if output == "json":
        print_json(fields)
        return
    fields["partitions"] = [str(where) for where in described.partitions]
    print_table(("FIELD", "VALUE"), [(name.replace("_", " "), value) for name, value in fields.items()])


async def _describe(transactional_id: str, cluster: Cluster) -> DescribedTransaction:
    return await TransactionAdmin(cluster).describe(transactional_id)


@command.command
@click.argument("topic", shell_complete=complete_topic)
@click.option("--partition", "-p", type=int, help="Only this partition.")
@bootstrap_option
@output_option
def producers(topic: str, partition: int | None, bootstrap: str, output: str) -> None:
    """Show the producers that the partitions of TOPIC remember, and what they have open."""
    found = run_with_cluster(bootstrap, partial(_producers, topic, partition))
    if output == "json":
        print_json([_producer_json(each) for each in found])
        return
    print_table(
        ("PARTITION", "PRODUCER ID", "EPOCH", "LAST SEQUENCE", "LAST WRITE", "OPEN SINCE OFFSET"),
        [
            (
                str(each.where),
                each.identity.producer_id,
                each.identity.producer_epoch,
                each.last_sequence,
                _time_text(each.last_timestamp_ms),
                each.start_offset,
            )
            for each in found
        ],
    )


async def _producers(topic: str, partition: int | None, cluster: Cluster) -> list[ActiveProducer]:
    found = await cluster.retry(partial(cluster.topic, topic))
    partitions = [
        TopicPartition(topic, each.partition)
        for each in found.partitions
        if partition in (None, each.partition)
    ]
    if not partitions:
        raise click.UsageError(f"topic {topic!r} has no partition {partition}")
    return await TransactionAdmin(cluster).producers(partitions)


@command.command(name="find-hanging")
@click.option(
    "--longer-than",
    type=parse_duration_ms,
    metavar="DURATION",
    default=DEFAULT_LONGER_THAN,
    show_default=True,
    help="Show also what a coordinator knows and has open for longer.",
)
@click.option("--topic", shell_complete=complete_topic, help="Look at this topic only.")
@click.option("--internal", is_flag=True, help="Look at the broker's own topics too.")
@bootstrap_option
@output_option
def find_hanging(longer_than: int, topic: str | None, internal: bool, bootstrap: str, output: str) -> None:
    """Find transactions that block readers of committed records.

    Those without a transactional id are known to no coordinator: nothing will ever end them. How each is
    ended stands beside it.
    """
    found = run_with_cluster(bootstrap, partial(_find_hanging, longer_than, topic, internal))
    if output == "json":
        print_json([_blocking_json(each) for each in found])
        return
    print_table(
        (
            "PARTITION",
            "PRODUCER ID",
            "EPOCH",
            "TRANSACTIONAL ID",
            "TWO-PHASE",
            "OPEN FOR",
            "FROM OFFSET",
            "LAG",
            "TO END IT",
        ),
        [
            (
                str(each.producer.where),
                each.producer.identity.producer_id,
                each.producer.identity.producer_epoch,
                each.transactional_id,
                each.is_two_phase,
                _duration_text(each.open_for_ms),
                each.producer.start_offset,
                each.lag,
                _remedy(each),
            )
            for each in found
        ],
    )
    if any(each.is_two_phase for each in found):
        click.echo(f"\n{TWO_PHASE_ADVICE}")


async def _find_hanging(
    longer_than_ms: int, topic: str | None, internal: bool, cluster: Cluster
) -> list[BlockingTransaction]:
    return await TransactionAdmin(cluster).find_blocking(
        longer_than_ms, topic=topic, include_internal=internal
    )


@command.command
@click.argument("transactional_id", required=False)
@click.option("--topic", shell_complete=complete_topic, help="The topic in which it hangs.")
@click.option("--partition", "-p", type=int, help="The partition in which it hangs.")
@click.option("--producer-id", type=int, help="The producer that left it open.")
@click.option("--force", is_flag=True, help="Abort also what may be prepared (two-phase commit).")
@bootstrap_option
@output_option
def abort(
    transactional_id: str | None,
    topic: str | None,
    partition: int | None,
    producer_id: int | None,
    force: bool,
    bootstrap: str,
    output: str,
) -> None:
    """Abort what TRANSACTIONAL_ID has open, and fence its producer.

    The epoch is raised first, so that the producer cannot commit afterwards. A transaction of two-phase
    commit may be prepared, and its other half committed elsewhere: that takes --force.

    For a transaction that has no transactional id any more, name the partition and the producer instead: if
    no coordinator knows it, a marker is written by hand.
    """
    if transactional_id is not None:
        if (topic, partition, producer_id) != (None, None, None):
            raise click.UsageError("give a transactional id, or a partition and a producer, not both")
        before = run_with_cluster(bootstrap, partial(_abort, transactional_id, force))
        if output == "json":
            print_json({"transactional_id": transactional_id, "state_before": before.state})
        else:
            click.echo(_abort_text(before))
        return
    if topic is None or partition is None or producer_id is None:
        raise click.UsageError("give a transactional id, or --topic, --partition and --producer-id")
    where = TopicPartition(topic, partition)
    owner = run_with_cluster(bootstrap, partial(_abort_in, where, producer_id, force))
    if output == "json":
        print_json({"transactional_id": owner, "producer_id": producer_id, "marker_by_hand": owner is None})
    elif owner is None:
        click.echo(f"wrote an abort marker to {where} for producer {producer_id}, which no coordinator knew")
    else:
        click.echo(f"aborted the transaction of {owner!r} in all its partitions, and fenced its producer")


async def _abort(transactional_id: str, force: bool, cluster: Cluster) -> DescribedTransaction:
    return await TransactionAdmin(cluster).abort(transactional_id, force=force)


async def _abort_in(where: TopicPartition, producer_id: int, force: bool, cluster: Cluster) -> str | None:
    return await TransactionAdmin(cluster).abort_in(where, producer_id, force=force)


@command.command
@bootstrap_option
@output_option
def stats(bootstrap: str, output: str) -> None:
    """Count transactional ids by state, and name the transaction that has been open for longest."""
    found = run_with_cluster(bootstrap, _stats)
    if output == "json":
        print_json(
            {
                "states": found.counts,
                "total": sum(found.counts.values()),
                "oldest": None if found.oldest is None else _described_json(found.oldest),
            }
        )
        return
    print_table(("STATE", "COUNT"), sorted(found.counts.items()))
    if found.oldest is not None:
        open_for = _duration_text(found.oldest.open_for_ms(_now_ms()))
        click.echo(f"\nOpen for longest: {found.oldest.transactional_id}, {open_for}")


async def _stats(cluster: Cluster) -> TransactionStats:
    return await TransactionAdmin(cluster).stats()


def _pattern(match: str | None) -> re.Pattern[str]:
    try:
        return re.compile(".*" if match is None else match, re.DOTALL)
    except re.error as error:
        raise click.UsageError(f"{match!r} is no regular expression: {error}") from None


def _described_json(described: DescribedTransaction) -> dict[str, object]:
    return {
        "transactional_id": described.transactional_id,
        "state": described.state,
        "producer_id": described.identity.producer_id,
        "producer_epoch": described.identity.producer_epoch,
        "timeout_ms": None if described.is_two_phase else described.timeout_ms,
        "two_phase": described.is_two_phase,
        "start_time_ms": described.start_time_ms,
        "open_for_ms": described.open_for_ms(_now_ms()),
        "coordinator": described.coordinator_id,
        "partitions": [
            {"topic": where.topic, "partition": where.partition} for where in described.partitions
        ],
    }


def _producer_json(producer: ActiveProducer) -> dict[str, object]:
    return {
        "topic": producer.where.topic,
        "partition": producer.where.partition,
        "producer_id": producer.identity.producer_id,
        "producer_epoch": producer.identity.producer_epoch,
        "last_sequence": producer.last_sequence,
        "last_timestamp_ms": producer.last_timestamp_ms,
        "coordinator_epoch": producer.coordinator_epoch,
        "start_offset": producer.start_offset,
    }


def _blocking_json(blocking: BlockingTransaction) -> dict[str, object]:
    return {
        **_producer_json(blocking.producer),
        "transactional_id": blocking.transactional_id,
        "hanging": blocking.is_hanging,
        "two_phase": blocking.is_two_phase,
        "open_for_ms": blocking.open_for_ms,
        "last_stable_offset": blocking.last_stable_offset,
        "end_offset": blocking.end_offset,
        "lag": blocking.lag,
        "remedy": _remedy(blocking),
    }


def _remedy(blocking: BlockingTransaction) -> str:
    if blocking.transactional_id is not None:
        force = "--force " if blocking.is_two_phase else ""
        return f"semel txn abort {force}{shlex.quote(blocking.transactional_id)}"
    where = blocking.producer.where
    producer_id = blocking.producer.identity.producer_id
    return f"semel txn abort --topic {where.topic} -p {where.partition} --producer-id {producer_id}"


def _abort_text(before: DescribedTransaction) -> str:
    if not before.is_open:
        return f"{before.transactional_id!r} had nothing open ({before.state}); its producer is fenced"
    count = len(before.partitions)
    partitions = "1 partition" if count == 1 else f"{count} partitions"
    return f"aborted {before.transactional_id!r} in {partitions}; its producer is fenced"


def _now_ms() -> int:
    return int(time.time() * 1000)


def _time_text(timestamp_ms: int) -> str | None:
    if timestamp_ms < 0:
        return None
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _duration_text(duration_ms: int | None) -> str | None:
    if duration_ms is None:
        return None
    seconds = duration_ms // 1000
    if seconds < 60:
        return f"{duration_ms / 1000:.1f} s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
