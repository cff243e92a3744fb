"""`semel sink`: what sinks have committed, who owns them, and a marker set by hand where it does not fit."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import click

from semel.cli.options import bootstrap_option, complete_topic
from semel.cli.tables import output_option, print_json, print_table
from semel.client.cluster import Cluster
from semel.errors import ConfigError, NotFoundError, how_to_install
from semel.sinks.marker import ANY_QUERY, Marker, Owner

T = TypeVar("T")

COLUMNS: Final = ("SINK", "EPOCH", "QUERY", "OWNER", "SINCE", "ALIVE")


class Status(Protocol):
    """A sink, wherever it keeps its marker."""

    @property
    def sink_id(self) -> str: ...
    @property
    def marker(self) -> Marker: ...
    @property
    def owner(self) -> Owner | None: ...
    @property
    def is_alive(self) -> bool: ...


class Registry(Protocol):
    """The sinks of a cluster or of a database."""

    async def sinks(self) -> Sequence[Status]: ...
    async def read(self, sink_id: str) -> Status | None: ...
    async def adopt(self, sink_id: str, epoch: int, query_id: str = ANY_QUERY) -> None: ...
    async def forget(self, sink_id: str) -> bool: ...


postgres_option = click.option(
    "--postgres", metavar="DSN", help="The sinks of a PostgreSQL database, in place of a broker's."
)
mysql_option = click.option(
    "--mysql", metavar="URL", help="The sinks of a MySQL or MariaDB database, in place of a broker's."
)


@click.group
def command() -> None:
    """See what transactional sinks have committed, and set a marker by hand.

    A sink keeps its marker where it writes: in the brokers' cluster, or in a database (--postgres, --mysql).
    """


@command.command(name="list")
@bootstrap_option
@postgres_option
@mysql_option
@output_option
def list_sinks(bootstrap: str, postgres: str | None, mysql: str | None, output: str) -> None:
    """List sinks, the last epoch of each, and who opened it last."""
    found = _run(bootstrap, postgres, mysql, None, _sinks)
    if output == "json":
        print_json([_fields(status) for status in found])
    else:
        print_table(COLUMNS, [_row(status) for status in found])


async def _sinks(registry: Registry) -> Sequence[Status]:
    return await registry.sinks()


@command.command
@click.argument("sink_id", metavar="SINK")
@bootstrap_option
@postgres_option
@mysql_option
@output_option
def status(sink_id: str, bootstrap: str, postgres: str | None, mysql: str | None, output: str) -> None:
    """Show one sink: its last epoch, where that came from, and its owner."""
    found = _run(bootstrap, postgres, mysql, None, lambda registry: registry.read(sink_id))
    if found is None:
        raise _unknown(sink_id)
    fields = _fields(found)
    if output == "json":
        print_json(fields)
    else:
        print_table(("FIELD", "VALUE"), [(name.replace("_", " "), value) for name, value in fields.items()])


@command.command
@click.argument("sink_id", metavar="SINK")
@click.option(
    "--epoch",
    type=click.IntRange(min=-1),
    required=True,
    help="The last epoch whose rows are in the target; -1 for none.",
)
@click.option(
    "--query-id", default=ANY_QUERY, help="The query that may go on; by default whichever comes next."
)
@click.option(
    "--topic", shell_complete=complete_topic, help="The output topic, for a Kafka sink without a marker."
)
@bootstrap_option
@postgres_option
@mysql_option
@output_option
def adopt(
    sink_id: str,
    epoch: int,
    query_id: str,
    topic: str | None,
    bootstrap: str,
    postgres: str | None,
    mysql: str | None,
    output: str,
) -> None:
    """Set the marker of SINK: its next epoch is EPOCH + 1, and EPOCH itself counts as written.

    For a sink whose checkpoint was wiped, rolled back, copied or renamed, or whose marker has expired. First
    find out which epochs are in the target: an epoch that is there is written twice if the marker is set too
    low, and one that is not is lost if it is set too high. Whoever has the sink open is fenced.
    """
    _run(bootstrap, postgres, mysql, topic, lambda registry: registry.adopt(sink_id, epoch, query_id))
    if output == "json":
        print_json({"sink": sink_id, "epoch": epoch, "query_id": query_id})
        return
    whose = "any query" if query_id == ANY_QUERY else f"query {query_id}"
    click.echo(f"sink {sink_id!r} goes on with epoch {epoch + 1}, from {whose}")


@command.command
@click.argument("sink_id", metavar="SINK")
@bootstrap_option
@postgres_option
@mysql_option
@output_option
def forget(sink_id: str, bootstrap: str, postgres: str | None, mysql: str | None, output: str) -> None:
    """Remove the marker of SINK: it begins at epoch 0 again. Rows stay; whoever has it open is fenced."""
    if not _run(bootstrap, postgres, mysql, None, lambda registry: registry.forget(sink_id)):
        raise _unknown(sink_id)
    if output == "json":
        print_json({"sink": sink_id, "epoch": None})
    else:
        click.echo(f"sink {sink_id!r} is forgotten: it begins at epoch 0")


def _run(
    bootstrap: str,
    postgres: str | None,
    mysql: str | None,
    topic: str | None,
    work: Callable[[Registry], Awaitable[T]],
) -> T:
    if postgres is not None and mysql is not None:
        raise click.UsageError("give --postgres or --mysql, not both")
    if topic is not None and (postgres or mysql) is not None:
        raise click.UsageError("--topic is for sinks that write to Kafka")
    if postgres is not None or mysql is not None:
        return asyncio.run(_with_database(postgres, mysql, work))
    return asyncio.run(_with_kafka(bootstrap, topic, work))


async def _with_kafka(bootstrap: str, topic: str | None, work: Callable[[Registry], Awaitable[T]]) -> T:
    from semel.sinks.kafka.registry import KafkaRegistry

    async with Cluster(bootstrap) as cluster:
        return await work(KafkaRegistry(cluster, topic))


async def _with_database(
    postgres: str | None, mysql: str | None, work: Callable[[Registry], Awaitable[T]]
) -> T:
    try:
        return await work(_sql_registry(postgres, mysql))
    except ImportError as error:
        extra = "postgres" if mysql is None else "mysql"
        raise ConfigError(f"{error.name} is not installed: {how_to_install(extra)}") from error


def _sql_registry(postgres: str | None, mysql: str | None) -> Registry:
    from semel.sinks.sql.registry import SqlRegistry

    if mysql is not None:
        from semel.sinks.mysql import MySQLDialect
        from semel.sinks.mysql.sink import parse_url

        return SqlRegistry(MySQLDialect(parse_url(mysql)))
    from semel.sinks.postgres import PostgresDialect

    return SqlRegistry(PostgresDialect(postgres or ""))


def _row(status: Status) -> tuple[object, ...]:
    owner = status.owner
    return (
        status.sink_id,
        status.marker.epoch,
        _query(status.marker),
        None if owner is None else f"{owner.pid}@{owner.host}",
        None if owner is None else owner.since,
        status.is_alive,
    )


def _fields(status: Status) -> dict[str, object]:
    owner = status.owner
    return {
        "sink": status.sink_id,
        "epoch": status.marker.epoch,
        "query_id": _query(status.marker),
        "offsets_digest": status.marker.offsets_digest or None,
        "owner_host": None if owner is None else owner.host,
        "owner_pid": None if owner is None else owner.pid,
        "owner_run": None if owner is None else owner.run,
        "owner_since": None if owner is None else owner.since,
        "is_alive": status.is_alive,
    }


def _query(marker: Marker) -> str | None:
    return "any" if marker.query_id == ANY_QUERY else marker.query_id or None


def _unknown(sink_id: str) -> NotFoundError:
    return NotFoundError(f"there is no sink {sink_id!r} with a marker: look for it with `semel sink list`")
