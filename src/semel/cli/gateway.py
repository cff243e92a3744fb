"""`semel gateway`: ACID subscriptions over gRPC, in front of Semel or any Kafka."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from semel.cli.options import bootstrap_option
from semel.errors import ConfigError
from semel.subscriptions.grpc import require_extra

if TYPE_CHECKING:
    from semel.subscriptions.grpc.server import GatewayServer

DEFAULT_ADDRESS: Final = "localhost:9095"

Command = TypeVar("Command", bound=Callable[..., Any])


def tls_options(command: Command) -> Command:
    """TLS of the gRPC service."""
    for option in (
        click.option(
            "--grpc-client-ca", metavar="FILE", help="gRPC clients need a certificate signed by it."
        ),
        click.option("--grpc-key", metavar="FILE", help="The private key of --grpc-cert, in PEM."),
        click.option("--grpc-cert", metavar="FILE", help="gRPC speaks TLS with this certificate, in PEM."),
    ):
        command = option(command)
    return command


class Tls:
    """What was given for TLS, checked where it is used, so that nothing of gRPC is imported before."""

    def __init__(self, cert: str | None, key: str | None, client_ca: str | None) -> None:
        if (cert is None) != (key is None):
            raise click.UsageError("--grpc-cert and --grpc-key belong together: one of them is missing")
        if client_ca is not None and cert is None:
            raise click.UsageError("--grpc-client-ca has no meaning without --grpc-cert and --grpc-key")
        self.cert = cert
        self.key = key
        self.client_ca = client_ca


def gateway_at(address: str, tls: Tls, bootstrap: str) -> "GatewayServer":
    """A gateway that is not started yet; ConfigError if the extra is not installed."""
    require_extra()
    from semel.subscriptions.grpc.server import GatewayServer, ServerTls

    if tls.cert is None or tls.key is None:
        return GatewayServer(bootstrap, address)
    return GatewayServer(bootstrap, address, tls=ServerTls(tls.cert, tls.key, tls.client_ca))


@click.command
@bootstrap_option
@click.option(
    "--grpc",
    "address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one.",
)
@tls_options
def command(
    bootstrap: str, address: str, grpc_cert: str | None, grpc_key: str | None, grpc_client_ca: str | None
) -> None:
    """Run a gateway until it is told to stop (SIGTERM, or Ctrl-C): ACID subscriptions over gRPC.

    It prints a line that begins with `ready` on stdout when it takes connections, and logs to stderr.
    Without --grpc-cert it speaks plain text, and takes whoever can reach it.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    tls = Tls(grpc_cert, grpc_key, grpc_client_ca)
    asyncio.run(_serve(bootstrap, check_address(address), tls))


async def _serve(bootstrap: str, address: str, tls: Tls) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with gateway_at(address, tls, bootstrap) as gateway:
        host = address.rpartition(":")[0]
        click.echo(f"ready {host}:{gateway.port} (brokers at {bootstrap})")
        await stop.wait()


def check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{address!r} is no address to listen on: write HOST:PORT")
    return address
