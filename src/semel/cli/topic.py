"""`semel topic`: create, list, describe, alter and delete topics."""

from functools import partial
from typing import Final

import click

from semel.cli.options import (
    bootstrap_option,
    complete_topic,
    parse_assignments,
    run_with_cluster,
)
from semel.cli.tables import output_option, print_json, print_table
from semel.client.admin import BROKER_DEFAULT, EARLIEST, LATEST, Admin, ConfigEntry, FoundOffset
from semel.client.cluster import Cluster
from semel.client.metadata import NO_NODE, Topic, TopicPartition
from semel.errors import BrokerError
from semel.wire.errors import ErrorCode
from semel.wire.primitives import uuid_text

SENSITIVE: Final = "(hidden)"

name_argument = click.argument("name", shell_complete=complete_topic)
config_option = click.option(
    "--config", "-c", "configs", multiple=True, metavar="NAME=VALUE", help="A topic config; may be repeated."
)


@click.group
def command() -> None:
    """Create, list, describe, alter and delete topics."""


@command.command
@click.argument("name")
@click.option(
    "--partitions", "-p", type=click.IntRange(min=1), help="How many; the broker's default if left out."
)
@click.option(
    "--replication-factor", type=click.IntRange(min=1), help="Copies; the broker's default if left out."
)
@config_option
@click.option("--if-not-exists", is_flag=True, help="Succeed where the topic exists already.")
@bootstrap_option
@output_option
def create(
    name: str,
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    bootstrap: str,
    output: str,
) -> None:
    """Create the topic NAME."""
    assigned = parse_assignments(configs)
    try:
        total = run_with_cluster(bootstrap, partial(_create, name, partitions, replication_factor, assigned))
    except BrokerError as error:
        if not (if_not_exists and error.code == ErrorCode.TOPIC_ALREADY_EXISTS):
            raise
        _print_done({"topic": name, "created": False, "partitions": None}, f"{name} exists already", output)
    else:
        _print_done({"topic": name, "created": True, "partitions": total}, _created_text(name, total), output)


async def _create(
    name: str,
    partitions: int | None,
    replication_factor: int | None,
    configs: dict[str, str],
    cluster: Cluster,
) -> int | None:
    return await Admin(cluster).create_topic(
        name,
        partitions=partitions or BROKER_DEFAULT,
        replication_factor=replication_factor or BROKER_DEFAULT,
        configs=configs,
    )


@command.command(name="list")
@click.option("--internal", is_flag=True, help="Show the broker's own topics too.")
@bootstrap_option
@output_option
def list_topics(internal: bool, bootstrap: str, output: str) -> None:
    """List all topics."""
    topics = run_with_cluster(bootstrap, partial(_list, internal))
    if output == "json":
        print_json([_topic_json(topic) for topic in topics])
    else:
        print_table(
            ("TOPIC", "PARTITIONS", "REPLICAS", "ID"),
            [
                (topic.name, len(topic.partitions), _replicas(topic), uuid_text(topic.topic_id))
                for topic in topics
            ],
        )


async def _list(internal: bool, cluster: Cluster) -> list[Topic]:
    return await Admin(cluster).list_topics(include_internal=internal)


@command.command
@name_argument
@click.option("--all-configs", is_flag=True, help="Show configs that have their default value too.")
@bootstrap_option
@output_option
def describe(name: str, all_configs: bool, bootstrap: str, output: str) -> None:
    """Show the partitions, offsets and configs of the topic NAME."""
    topic, starts, ends, configs = run_with_cluster(bootstrap, partial(_describe, name))
    shown = [entry for entry in configs if all_configs or entry.source == "topic"]
    rows = [
        (
            each.partition,
            None if each.leader_id == NO_NODE else each.leader_id,
            each.leader_epoch,
            each.replicas,
            each.in_sync_replicas,
            _offset(starts, name, each.partition),
            _offset(ends, name, each.partition),
        )
        for each in topic.partitions
    ]
    if output == "json":
        fields = ("partition", "leader", "leader_epoch", "replicas", "isr", "start_offset", "end_offset")
        print_json(
            {
                **_topic_json(topic),
                "partitions": [dict(zip(fields, row, strict=True)) for row in rows],
                "configs": {entry.name: {"value": entry.value, "source": entry.source} for entry in shown},
            }
        )
        return
    click.echo(f"{topic.name} (id {uuid_text(topic.topic_id)})\n")
    print_table(("PARTITION", "LEADER", "EPOCH", "REPLICAS", "ISR", "START", "END"), rows)
    if shown:
        click.echo()
        print_table(("CONFIG", "VALUE", "SOURCE"), [_config_row(entry) for entry in shown])


async def _describe(
    name: str, cluster: Cluster
) -> tuple[Topic, dict[TopicPartition, FoundOffset], dict[TopicPartition, FoundOffset], list[ConfigEntry]]:
    admin = Admin(cluster)
    topic = await admin.describe_topic(name)
    # The offsets of a partition without a leader cannot be asked for, and the rest is worth showing.
    led = [TopicPartition(name, each.partition) for each in topic.partitions if each.leader_id != NO_NODE]
    starts = await admin.list_offsets(dict.fromkeys(led, EARLIEST))
    ends = await admin.list_offsets(dict.fromkeys(led, LATEST))
    return topic, starts, ends, await admin.topic_configs(name)


@command.command
@name_argument
@click.option("--partitions", "-p", type=click.IntRange(min=1), help="The new total; it can only grow.")
@config_option
@click.option(
    "--unset", multiple=True, metavar="NAME", help="Take a config back to its default; may be repeated."
)
@bootstrap_option
@output_option
def alter(
    name: str,
    partitions: int | None,
    configs: tuple[str, ...],
    unset: tuple[str, ...],
    bootstrap: str,
    output: str,
) -> None:
    """Change configs or the number of partitions of the topic NAME."""
    if partitions is None and not configs and not unset:
        raise click.UsageError("nothing to change: give --partitions, --config or --unset")
    assigned = parse_assignments(configs)
    run_with_cluster(bootstrap, partial(_alter, name, partitions, assigned, unset))
    done: dict[str, object] = {"topic": name, "partitions": partitions, "configs": assigned, "unset": unset}
    _print_done(done, f"altered {name}", output)


async def _alter(
    name: str, partitions: int | None, configs: dict[str, str], unset: tuple[str, ...], cluster: Cluster
) -> None:
    admin = Admin(cluster)
    if configs or unset:
        await admin.alter_topic_configs(name, assign=configs, remove=unset)
    if partitions is not None:
        await admin.create_partitions(name, partitions)


@command.command
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_topic)
@bootstrap_option
@output_option
def delete(names: tuple[str, ...], bootstrap: str, output: str) -> None:
    """Delete topics and all their records."""
    run_with_cluster(bootstrap, partial(_delete, names))
    _print_done({"deleted": names}, f"deleted {', '.join(names)}", output)


async def _delete(names: tuple[str, ...], cluster: Cluster) -> None:
    await Admin(cluster).delete_topics(names)


def _created_text(name: str, partitions: int | None) -> str:
    if partitions is None:
        return f"created {name}"
    return f"created {name} with {partitions} {'partition' if partitions == 1 else 'partitions'}"


def _print_done(done: dict[str, object], text: str, output: str) -> None:
    if output == "json":
        print_json(done)
    else:
        click.echo(text)


def _topic_json(topic: Topic) -> dict[str, object]:
    return {
        "name": topic.name,
        "id": uuid_text(topic.topic_id),
        "internal": topic.is_internal,
        "partitions": len(topic.partitions),
        "replicas": _replicas(topic),
    }


def _replicas(topic: Topic) -> int:
    return max((len(partition.replicas) for partition in topic.partitions), default=0)


def _offset(found: dict[TopicPartition, FoundOffset], name: str, partition: int) -> int | None:
    answer = found.get(TopicPartition(name, partition))
    return None if answer is None else answer.offset


def _config_row(entry: ConfigEntry) -> tuple[str, str | None, str]:
    return entry.name, SENSITIVE if entry.is_sensitive else entry.value, entry.source
