"""`semel serve`: run a broker."""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import click

from semel.cli.gateway import Tls, check_address, gateway_at, tls_options
from semel.cli.settings import config_option, load_settings, set_option
from semel.server.main import Beside, serve
from semel.subscriptions.grpc import require_extra


@click.command
@click.option("--data", "-d", metavar="DIR", help="Where everything is kept (log.dirs).")
@click.option(
    "--listen", "-l", metavar="HOST:PORT", help="Where to listen (listeners); port 0 takes a free one."
)
@click.option(
    "--durability",
    type=click.Choice(["fsync", "os"]),
    help="fsync: acknowledged means on disk. os: in the page cache, as Kafka does by default.",
)
@click.option("--in-memory", is_flag=True, help="Keep nothing on disk: for tests.")
@click.option("--grpc", metavar="HOST:PORT", help="Serve ACID subscriptions over gRPC as well; docs/grpc.md.")
@tls_options
@set_option
@config_option
def command(
    data: str | None,
    listen: str | None,
    durability: str | None,
    in_memory: bool,
    grpc: str | None,
    grpc_cert: str | None,
    grpc_key: str | None,
    grpc_client_ca: str | None,
    assignments: tuple[str, ...],
    config: Path | None,
) -> None:
    """Run a broker until it is told to stop (SIGTERM, or Ctrl-C).

    It prints a line that begins with `ready` on stdout when it takes connections, and logs to stderr.
    Settings come from --config, then SEMEL_* variables, then flags; `semel config show` explains them.
    """
    if in_memory and data is not None:
        raise click.UsageError("--in-memory keeps nothing on disk, so --data has no meaning with it")
    named = {"log.dirs": data, "listeners": listen, "durability": durability}
    settings = load_settings(config, os.environ, assignments, named)
    tls = Tls(grpc_cert, grpc_key, grpc_client_ca)
    beside: Beside = nullcontext
    if grpc is not None:
        require_extra()
        beside = partial(gateway_at, check_address(grpc), tls)
    elif grpc_cert is not None:
        raise click.UsageError("--grpc-cert has no meaning without --grpc")
    sys.exit(serve(settings, in_memory=in_memory, beside=beside))
