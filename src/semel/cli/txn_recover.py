"""`semel txn recover`: end what an application left prepared, as its database says."""

from functools import partial
from typing import TYPE_CHECKING

import click

from semel.cli.options import bootstrap_option, run_with_cluster
from semel.cli.tables import output_option, print_json, print_table
from semel.client.cluster import Cluster
from semel.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from semel.sinks.atomic.recovery import RecoveredSlot


@click.command
@click.option(
    "--postgres",
    required=True,
    envvar="SEMEL_POSTGRES",
    show_envvar=True,
    metavar="DSN",
    help="The database of the application, as libpq takes it.",
)
@click.option("--name", "names", multiple=True, help="Only this name; all of the database's otherwise.")
@click.option("--table", default="semel_transactions", show_default=True, help="Where the rows are.")
@click.option("--force", is_flag=True, help="Fence also an application that still has sessions open.")
@bootstrap_option
@output_option
def recover(
    postgres: str, names: tuple[str, ...], table: str, force: bool, bootstrap: str, output: str
) -> None:
    """End what applications with `semel.transaction` left prepared, as their database says.

    A prepared transaction has no timeout, and readers of its topics wait for it. The application ends it
    when it starts; this does the same for one that does not come back.
    """
    found = run_with_cluster(bootstrap, partial(_recover, postgres, names, table, force))
    rows = [(each.name, each.transactional_id, each.recovered.value) for each in found]
    if output == "json":
        fields = ("name", "transactional_id", "outcome")
        print_json([dict(zip(fields, row, strict=True)) for row in rows])
    else:
        print_table(("NAME", "TRANSACTIONAL ID", "OUTCOME"), rows)


async def _recover(
    postgres: str, names: tuple[str, ...], table: str, force: bool, cluster: Cluster
) -> "list[RecoveredSlot]":
    try:
        from semel.sinks.atomic.recovery import recover as recover_names
        from semel.sinks.atomic.settings import AtomicSettings
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {how_to_install('postgres')}") from error
    return await recover_names(cluster, postgres, names, force=force, settings=AtomicSettings(table=table))
