"""`semel subscription`: what subscriptions have acknowledged, and the way back for dead letters."""

from functools import partial
from typing import NamedTuple

import click

from semel.cli.options import bootstrap_option, complete_topic, run_with_cluster
from semel.cli.tables import output_option, print_json, print_table
from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.errors import broker_error
from semel.client.group_offsets import fetch_offsets
from semel.client.groups import DescribedGroup, describe_group, list_groups
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.subscriptions.dead_letters import dead_letter_topic
from semel.subscriptions.entry import Entry, parse_entry
from semel.subscriptions.redrive import Redriven, redrive
from semel.wire.errors import ErrorCode


class Progress(NamedTuple):
    """One partition of a subscription."""

    entry: Entry
    end: int | None
    owner: str | None

    @property
    def acknowledged_above(self) -> int:
        return sum(end - start for start, end in self.entry.acknowledged)

    @property
    def failing(self) -> int:
        return sum(mark.end - mark.start for mark in self.entry.marks if mark.attempts)

    @property
    def most_attempts(self) -> int:
        return max((mark.attempts for mark in self.entry.marks), default=0)

    @property
    def waiting(self) -> int | None:
        """Offsets yet to be acknowledged; some may hold no record."""
        return None if self.end is None else max(0, self.end - self.entry.offset - self.acknowledged_above)


@click.group
def command() -> None:
    """See subscriptions, and send dead letters back."""


@command.command(name="list")
@bootstrap_option
@output_option
def list_all(bootstrap: str, output: str) -> None:
    """List the groups that have subscriptions."""
    found = run_with_cluster(bootstrap, _list)
    if output == "json":
        print_json(
            [
                {
                    "group": group,
                    "state": state,
                    "topics": topics,
                    "partitions": partitions,
                    "failing": failing,
                }
                for group, state, topics, partitions, failing in found
            ]
        )
        return
    print_table(("GROUP", "STATE", "TOPICS", "PARTITIONS", "FAILING"), found)


async def _list(cluster: Cluster) -> list[tuple[str, str, list[str], int, int]]:
    rows = []
    for group in await list_groups(cluster):
        entries = await _entries(cluster, group.group_id)
        if entries:
            topics = sorted({where.topic for where in entries})
            failing = sum(1 for entry in entries.values() for mark in entry.marks if mark.attempts)
            rows.append((group.group_id, group.state, topics, len(entries), failing))
    return rows


async def _entries(cluster: Cluster, group_id: str) -> dict[TopicPartition, Entry]:
    entries: dict[TopicPartition, Entry] = {}
    for where, committed in (await fetch_offsets(cluster, group_id, require_stable=False)).items():
        entry = parse_entry(committed.offset, committed.metadata)
        if entry is not None:
            entries[where] = entry
    return entries


@command.command
@click.argument("group_id", metavar="GROUP")
@bootstrap_option
@output_option
def describe(group_id: str, bootstrap: str, output: str) -> None:
    """Show what GROUP has acknowledged, what fails, and who owns its partitions."""
    group, progress = run_with_cluster(bootstrap, partial(_describe, group_id))
    if output == "json":
        print_json(_described_json(group, progress))
        return
    click.echo(f"{group.group_id}: {group.state}, {len(group.members)} subscribers\n")
    print_table(
        (
            "TOPIC",
            "PARTITION",
            "OFFSET",
            "STABLE END",
            "WAITING",
            "ACKNOWLEDGED ABOVE",
            "FAILING",
            "MOST ATTEMPTS",
            "SLOTS",
            "OWNER",
        ),
        [
            (
                where.topic,
                where.partition,
                each.entry.offset,
                each.end,
                each.waiting,
                each.acknowledged_above,
                each.failing,
                each.most_attempts,
                each.entry.slots,
                each.owner,
            )
            for where, each in sorted(progress.items())
        ],
    )
    idle = [member.member_id for member in group.members if not member.partitions]
    if idle:
        click.echo(f"\nwaiting for partitions: {', '.join(idle)}")


async def _describe(group_id: str, cluster: Cluster) -> tuple[DescribedGroup, dict[TopicPartition, Progress]]:
    group = await describe_group(cluster, group_id)
    if not group.exists:
        raise broker_error(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id!r} cannot be described")
    entries = await _entries(cluster, group_id)
    if not entries:
        raise ConfigError(
            f"group {group_id!r} has no subscriptions: it is one of ordinary consumers; see it with "
            "`semel group describe`"
        )
    owners = {
        where: f"{member.member_id} ({member.host})"
        for member in group.members
        for where in member.partitions
    }
    ends = await _ends(cluster, entries)
    return group, {
        where: Progress(entry, ends.get(where), owners.get(where)) for where, entry in entries.items()
    }


async def _ends(cluster: Cluster, entries: dict[TopicPartition, Entry]) -> dict[TopicPartition, int]:
    """Where the partitions end that there still are: an offset may outlive its topic."""
    admin = Admin(cluster)
    counts = {topic.name: len(topic.partitions) for topic in await admin.list_topics()}
    wanted = {where: LATEST for where in entries if where.partition < counts.get(where.topic, 0)}
    found = await admin.list_offsets(wanted, isolation_level=READ_COMMITTED) if wanted else {}
    return {where: answer.offset for where, answer in found.items()}


def _described_json(group: DescribedGroup, progress: dict[TopicPartition, Progress]) -> object:
    return {
        "group": group.group_id,
        "state": group.state,
        "subscribers": [member.member_id for member in group.members],
        "partitions": [
            {
                "topic": where.topic,
                "partition": where.partition,
                "offset": each.entry.offset,
                "stable_end": each.end,
                "waiting": each.waiting,
                "acknowledged": [list(run) for run in each.entry.acknowledged],
                "failing": [
                    {"from": mark.start, "to": mark.end - 1, "attempts": mark.attempts, "out": mark.is_out}
                    for mark in each.entry.marks
                ],
                "suspects_below": each.entry.suspect_end,
                "slots": each.entry.slots,
                "owner": each.owner,
            }
            for where, each in sorted(progress.items())
        ],
    }


@command.command(name="redrive")
@click.argument("group_id", metavar="GROUP")
@click.option(
    "--topic",
    required=True,
    metavar="TOPIC",
    shell_complete=complete_topic,
    help="Where the letters came from.",
)
@click.option("--dead-letter-topic", metavar="TOPIC", help="TOPIC.GROUP.dead, if left out.")
@bootstrap_option
@output_option
def redrive_letters(
    group_id: str, topic: str, dead_letter_topic: str | None, bootstrap: str, output: str
) -> None:
    """Send the dead letters of GROUP back to where they came from, each once.

    Other groups with subscriptions pass over them; ordinary consumers of the topic see them again.
    """
    dead_topic = _dead_topic(dead_letter_topic, topic, group_id)
    done = run_with_cluster(bootstrap, partial(_redrive, dead_topic, group_id))
    if output == "json":
        print_json({"redriven": done.total, "topics": done.counts})
    else:
        click.echo(f"{done.total} dead letters of {dead_topic} went back")


def _dead_topic(given: str | None, topic: str, group_id: str) -> str:
    return dead_letter_topic(given, topic, group_id)


async def _redrive(dead_topic: str, group_id: str, cluster: Cluster) -> Redriven:
    return await redrive(cluster, dead_topic, group_id)
