"""`semel group`: list, describe, reset and delete consumer groups; on Semel and on any Kafka."""

from functools import partial
from typing import Final, NamedTuple

import click

from semel.cli.consume import parse_start
from semel.cli.options import bootstrap_option, complete_topic, run_with_cluster
from semel.cli.tables import output_option, print_json, print_table
from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.errors import broker_error
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets, fetch_offsets
from semel.client.groups import (
    DescribedGroup,
    ListedGroup,
    Member,
    delete_group,
    describe_group,
    list_groups,
)
from semel.client.lag import MAX_COUNTED_GAP, Lag, find_lags
from semel.client.metadata import TopicPartition
from semel.wire.errors import ErrorCode

LISTED_MEMBERS: Final = 5
"""Members that an error names."""


class Place(NamedTuple):
    """Where a reset goes: to an offset, by some offsets, or to a time (or EARLIEST, LATEST)."""

    offset: int | None = None
    shift: int | None = None
    timestamp_ms: int = EARLIEST


class Reset(NamedTuple):
    """What a reset does to one partition."""

    before: int | None
    after: int


class Progress(NamedTuple):
    """One partition of a group."""

    committed: int | None
    lag: Lag | None
    member: Member | None


def parse_place(text: str) -> Place:
    """Reads `earliest`, `latest`, an offset, `+N` or `-N`, or `@` and a time."""
    if text in ("earliest", "latest"):
        return Place(timestamp_ms=EARLIEST if text == "earliest" else LATEST)
    if text[:1] in ("+", "-") and text[1:].isascii() and text[1:].isdigit():
        return Place(shift=int(text))
    if text.isascii() and text.isdigit():
        return Place(offset=int(text))
    if text.startswith("@"):
        return Place(timestamp_ms=parse_start(text).timestamp_ms)
    raise click.BadParameter(f"{text!r} is none of: earliest, latest, an offset, +N, -N, or @ and a time")


@click.group
def command() -> None:
    """List, describe, reset and delete consumer groups."""


@command.command(name="list")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only these: Stable, Empty, ...")
@bootstrap_option
@output_option
def list_all(states: tuple[str, ...], bootstrap: str, output: str) -> None:
    """List all groups."""
    wanted = {state.lower() for state in states}
    groups = [
        group
        for group in run_with_cluster(bootstrap, list_groups)
        if not wanted or group.state.lower() in wanted
    ]
    if output == "json":
        print_json([_listed_json(group) for group in groups])
        return
    print_table(
        ("GROUP", "STATE", "TYPE", "PROTOCOL", "COORDINATOR"),
        [
            (group.group_id, group.state, group.kind, group.protocol_type, group.coordinator_id)
            for group in groups
        ],
    )


@command.command
@click.argument("group_id", metavar="GROUP")
@click.option(
    "--count-up-to",
    type=click.IntRange(min=0),
    default=MAX_COUNTED_GAP,
    show_default=True,
    metavar="OFFSETS",
    help="Read gaps up to this size to count their records; larger ones are an upper bound.",
)
@bootstrap_option
@output_option
def describe(group_id: str, count_up_to: int, bootstrap: str, output: str) -> None:
    """Show the members of GROUP, its offsets, and how many records it has yet to read."""
    group, progress = run_with_cluster(bootstrap, partial(_describe, group_id, count_up_to))
    if output == "json":
        print_json(_described_json(group, progress))
        return
    assignor = f", assignor {group.assignor}" if group.assignor else ""
    click.echo(f"{group.group_id}: {group.state}, {group.kind}{assignor}, {len(group.members)} members\n")
    print_table(
        ("TOPIC", "PARTITION", "COMMITTED", "STABLE END", "END", "LAG", "MEMBER", "HOST"),
        [_progress_row(where, progress[where]) for where in sorted(progress)],
    )
    idle = [member for member in group.members if not member.partitions]
    if idle:
        click.echo(f"\nwithout partitions: {', '.join(member.member_id for member in idle)}")


async def _describe(
    group_id: str, count_up_to: int, cluster: Cluster
) -> tuple[DescribedGroup, dict[TopicPartition, Progress]]:
    group = await describe_group(cluster, group_id)
    if not group.exists:
        raise broker_error(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id!r} cannot be described")
    committed = await fetch_offsets(cluster, group_id, require_stable=False)
    owners = {where: member for member in group.members for where in member.partitions}
    # Offsets may outlive their topic.
    topics = {topic.name: len(topic.partitions) for topic in await Admin(cluster).list_topics()}
    present = {
        where: offset.offset
        for where, offset in committed.items()
        if where.partition < topics.get(where.topic, 0)
    }
    lags = await find_lags(cluster, present, max_counted_gap=count_up_to)
    progress = {}
    for where in {*committed, *owners}:
        offset = committed[where].offset if where in committed else None
        progress[where] = Progress(offset, lags.get(where), owners.get(where))
    return group, progress


@command.command
@click.argument("group_id", metavar="GROUP")
@click.option(
    "--to",
    "place",
    required=True,
    type=parse_place,
    metavar="PLACE",
    help="earliest, latest, an offset, +N or -N from where it is, or @TIME (milliseconds or ISO 8601).",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:PARTITION,...]",
    shell_complete=complete_topic,
    help="Only these; all that the group has offsets of if left out. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@bootstrap_option
@output_option
def reset(
    group_id: str, place: Place, topics: tuple[str, ...], dry_run: bool, bootstrap: str, output: str
) -> None:
    """Move the offsets of GROUP, which must have no members.

    A place outside of the log becomes its nearest end. The latest place is the last stable offset, so that
    nothing of a transaction that is open now is skipped.
    """
    resets = run_with_cluster(bootstrap, partial(_reset, group_id, place, topics, dry_run))
    if output == "json":
        print_json(
            [
                {
                    "topic": where.topic,
                    "partition": where.partition,
                    "before": moved.before,
                    "after": moved.after,
                }
                for where, moved in sorted(resets.items())
            ]
        )
        return
    print_table(
        ("TOPIC", "PARTITION", "BEFORE", "AFTER"),
        [(where.topic, where.partition, *moved) for where, moved in sorted(resets.items())],
    )
    if dry_run:
        click.echo("nothing was changed (--dry-run)", err=True)


async def _reset(
    group_id: str, place: Place, topics: tuple[str, ...], dry_run: bool, cluster: Cluster
) -> dict[TopicPartition, Reset]:
    _check_no_members(await describe_group(cluster, group_id))
    committed = await fetch_offsets(cluster, group_id, require_stable=False)
    if topics:
        wanted = [where for text in topics for where in await _partitions(text, cluster)]
    elif committed:
        wanted = list(committed)
    else:
        raise click.UsageError(f"group {group_id!r} has no offsets: say which --topic to set them for")
    resets = await _moves(place, wanted, committed, Admin(cluster))
    if not dry_run:
        offsets = {where: CommittedOffset(moved.after) for where, moved in resets.items()}
        await commit_offsets(cluster, GroupMetadata(group_id), offsets)
    return resets


def _check_no_members(group: DescribedGroup) -> None:
    if group.members:
        named = [f"{member.member_id} ({member.host})" for member in group.members[:LISTED_MEMBERS]]
        more = len(group.members) - len(named)
        named += [f"{more} more"] if more else []
        raise broker_error(
            ErrorCode.NON_EMPTY_GROUP,
            f"the offsets of group {group.group_id!r} cannot be moved while it has members: stop "
            + ", ".join(named),
        )


async def _partitions(text: str, cluster: Cluster) -> list[TopicPartition]:
    """`topic` or `topic:0,2`."""
    name, colon, indexes = text.partition(":")
    topic = await cluster.retry(partial(cluster.topic, name))
    if not colon:
        return [TopicPartition(name, each.partition) for each in topic.partitions]
    if not all(index.isascii() and index.isdigit() for index in indexes.split(",")):
        raise click.UsageError(f"{text!r} is not of the form TOPIC[:PARTITION,...]")
    return [TopicPartition(name, int(index)) for index in indexes.split(",")]


async def _moves(
    place: Place,
    wanted: list[TopicPartition],
    committed: dict[TopicPartition, CommittedOffset],
    admin: Admin,
) -> dict[TopicPartition, Reset]:
    starts = await admin.list_offsets(dict.fromkeys(wanted, EARLIEST))
    ends = await admin.list_offsets(dict.fromkeys(wanted, LATEST), isolation_level=READ_COMMITTED)
    at_time = starts
    if place.timestamp_ms == LATEST:
        at_time = ends
    elif place.timestamp_ms != EARLIEST:
        at_time = await admin.list_offsets(dict.fromkeys(wanted, place.timestamp_ms))
    resets = {}
    for where in wanted:
        before = committed[where].offset if where in committed else None
        if place.shift is not None:
            if before is None:
                raise click.UsageError(f"{where} has no offset to move by {place.shift:+d}")
            target = before + place.shift
        elif place.offset is not None:
            target = place.offset
        else:
            # Nothing is as young as the time: whatever comes next is.
            target = at_time[where].offset if at_time[where].offset >= 0 else ends[where].offset
        after = max(starts[where].offset, min(target, ends[where].offset))
        resets[where] = Reset(before, after)
    return resets


@command.command
@click.argument("group_ids", nargs=-1, required=True, metavar="GROUP...")
@bootstrap_option
@output_option
def delete(group_ids: tuple[str, ...], bootstrap: str, output: str) -> None:
    """Delete groups that have no members, and their offsets."""
    run_with_cluster(bootstrap, partial(_delete, group_ids))
    if output == "json":
        print_json({"deleted": group_ids})
    else:
        click.echo(f"deleted {', '.join(group_ids)}")


async def _delete(group_ids: tuple[str, ...], cluster: Cluster) -> None:
    for group_id in group_ids:
        await delete_group(cluster, group_id)


def _progress_row(where: TopicPartition, progress: Progress) -> tuple[object, ...]:
    lag, member = progress.lag, progress.member
    return (
        where.topic,
        where.partition,
        progress.committed,
        None if lag is None else lag.last_stable_offset,
        None if lag is None else lag.end_offset,
        None if lag is None else str(lag),
        None if member is None else member.member_id,
        None if member is None else member.host,
    )


def _listed_json(group: ListedGroup) -> dict[str, object]:
    return {
        "group": group.group_id,
        "state": group.state,
        "type": group.kind,
        "protocol": group.protocol_type,
        "coordinator": group.coordinator_id,
    }


def _described_json(group: DescribedGroup, progress: dict[TopicPartition, Progress]) -> dict[str, object]:
    return {
        "group": group.group_id,
        "state": group.state,
        "type": group.kind,
        "assignor": group.assignor,
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.host,
                "partitions": [list(where) for where in member.partitions],
            }
            for member in group.members
        ],
        "partitions": [_progress_json(where, progress[where]) for where in sorted(progress)],
    }


def _progress_json(where: TopicPartition, progress: Progress) -> dict[str, object]:
    lag = progress.lag
    return {
        "topic": where.topic,
        "partition": where.partition,
        "committed": progress.committed,
        "stable_end": None if lag is None else lag.last_stable_offset,
        "end": None if lag is None else lag.end_offset,
        "lag": None if lag is None else lag.records,
        "lag_is_exact": lag is not None and lag.is_exact,
        "member": None if progress.member is None else progress.member.member_id,
    }
