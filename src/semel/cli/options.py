"""Options and arguments that several commands share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import click
from click.shell_completion import CompletionItem

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.errors import SemelError

T = TypeVar("T")

DEFAULT_BOOTSTRAP: Final = "localhost:9092"
# A shell that completes a name must not hang on a broker that is not there.
COMPLETION_TIMEOUT_MS: Final = 1_000

bootstrap_option = click.option(
    "--bootstrap",
    "-b",
    envvar="SEMEL_BOOTSTRAP",
    default=DEFAULT_BOOTSTRAP,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT[,...]",
    help="Where the broker listens.",
)


def run_with_cluster(bootstrap: str, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Connects, does the work, and closes."""
    return asyncio.run(_with_cluster(bootstrap, work))


async def _with_cluster(bootstrap: str, work: Callable[[Cluster], Awaitable[T]]) -> T:
    async with Cluster(bootstrap) as cluster:
        return await work(cluster)


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Topic names for the shell; none where no broker answers."""
    try:
        names = asyncio.run(_topic_names(str(ctx.params.get("bootstrap") or DEFAULT_BOOTSTRAP)))
    except SemelError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


async def _topic_names(bootstrap: str) -> list[str]:
    options = ConnectionOptions(
        connect_timeout_ms=COMPLETION_TIMEOUT_MS, request_timeout_ms=COMPLETION_TIMEOUT_MS
    )
    async with Cluster(bootstrap, options) as cluster:
        return [topic.name for topic in await Admin(cluster).list_topics()]


def parse_assignments(assignments: tuple[str, ...]) -> dict[str, str]:
    """Reads repeated `name=value` options."""
    parsed: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{assignment!r} is not of the form NAME=VALUE")
        parsed[name] = value
    return parsed
