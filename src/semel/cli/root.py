"""The root command: a table of subcommands, each imported only when it runs.

Exit codes, for all of them: 0 done, 1 failed, 2 wrong usage, 3 no broker or database could be reached, 4 what
was named does not exist or exists already, 130 interrupted. Errors are one line on stderr, but for click's of
options and arguments, which show the usage first.
"""

import errno
import os
import sys
from importlib import import_module
from typing import Final, NamedTuple, cast

import click

from semel.errors import BrokerError, ConfigError, NotFoundError, SemelError
from semel.version import __version__
from semel.wire.errors import ErrorCode

FAILED: Final = 1
WRONG_USAGE: Final = 2
NOT_REACHED: Final = 3
EXISTENCE: Final = 4
INTERRUPTED: Final = 130

NO_BROKER_CODES: Final = frozenset({ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT})
EXISTENCE_CODES: Final = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.TOPIC_ALREADY_EXISTS,
        ErrorCode.GROUP_ID_NOT_FOUND,
        ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
    }
)


class Subcommand(NamedTuple):
    module: str
    summary: str


# The summaries stand here so that `semel --help` imports none of the modules.
SUBCOMMANDS: Final = {
    "serve": Subcommand("semel.cli.serve", "Run a broker."),
    "topic": Subcommand("semel.cli.topic", "Create, list, describe, alter and delete topics."),
    "produce": Subcommand("semel.cli.produce", "Send lines from stdin to a topic."),
    "consume": Subcommand("semel.cli.consume", "Print the records of a topic."),
    "run": Subcommand("semel.cli.run", "Keep a pipeline on Spark running."),
    "spark": Subcommand("semel.cli.spark", "See whether this machine has what Spark needs."),
    "subscription": Subcommand(
        "semel.cli.subscription", "See subscriptions, and redrive their dead letters."
    ),
    "stages": Subcommand("semel.cli.stages", "Run the stages of a module, each a subscription."),
    "txn": Subcommand("semel.cli.txn", "See, find and abort transactions."),
    "gateway": Subcommand("semel.cli.gateway", "Serve ACID subscriptions over gRPC."),
    "group": Subcommand("semel.cli.group", "List, describe, reset and delete consumer groups."),
    "sink": Subcommand("semel.cli.sink", "See what transactional sinks have committed; set a marker."),
    "config": Subcommand("semel.cli.config", "Show the broker's settings and where each comes from."),
    "journal": Subcommand("semel.cli.journal", "Check and repair the files of a stopped broker."),
    "bench": Subcommand("semel.cli.bench", "Measure a broker, Semel or any Kafka."),
    "verify": Subcommand("semel.cli.verify", "Check that a broker, Semel or any Kafka, is exactly-once."),
    "simulate": Subcommand("semel.cli.simulate", "Crash simulated brokers and hold them to their promises."),
    "completion": Subcommand("semel.cli.completion", "Print a shell completion script."),
    "version": Subcommand("semel.cli.version", "Print the version."),
}


class RootGroup(click.Group):
    """Finds subcommands by name and turns what they raise into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = SUBCOMMANDS.get(cmd_name)
        if subcommand is None:
            return None
        return cast("click.Command", import_module(subcommand.module).command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.summary) for name, subcommand in SUBCOMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SemelError as error:
            raise _failure(error, exit_code(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise _failure(error, FAILED) from error
            _discard_output()
            raise click.exceptions.Exit(0) from None


@click.group(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="semel %(version)s", help="Print the version and exit.")
def root() -> None:
    """Exactly-once for stream pipelines: on Spark, in Python, with a broker that speaks Kafka's protocol.

    Commands that talk to a broker find it with --bootstrap or SEMEL_BOOTSTRAP.
    """


def main() -> None:
    """The entry point of the `semel` script."""
    root.main(prog_name="semel")


def exit_code(error: SemelError) -> int:
    from semel.sinks.errors import ConnectionLost

    if isinstance(error, NotFoundError):
        return EXISTENCE
    if isinstance(error, ConfigError):
        return WRONG_USAGE
    if isinstance(error, ConnectionLost):
        return NOT_REACHED
    if isinstance(error, BrokerError):
        if error.code in NO_BROKER_CODES:
            return NOT_REACHED
        if error.code in EXISTENCE_CODES:
            return EXISTENCE
    return FAILED


def _failure(error: Exception, code: int) -> click.exceptions.Exit:
    """Says what happened, in one line."""
    click.echo(f"semel: {' '.join(str(error).split()) or type(error).__name__}", err=True)
    return click.exceptions.Exit(code)


def _discard_output() -> None:
    """The reader of our output has gone, as `head` does: what is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
