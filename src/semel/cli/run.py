"""`semel run`: keep a pipeline on Spark alive, and show how far it is."""

import asyncio
import logging
import signal
import sys
import threading
from pathlib import Path

import click

from semel.cli.progress_display import OverTheBar, ProgressDisplay
from semel.cli.root import FAILED
from semel.errors import ConfigError
from semel.server.metrics_endpoint import MetricsEndpoint
from semel.spark.progress import render_metrics
from semel.spark.session import DEFAULT_MASTER
from semel.spark.supervisor import DEFAULT_MAX_CRASHES, Supervisor


@click.command
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--until-caught-up", is_flag=True, help="Read what is there now, and end.")
@click.option("--trigger", help="How often a batch is begun, such as '5 seconds'; at once if not given.")
@click.option("--master", default=DEFAULT_MASTER, show_default=True, help="Spark's master.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; repeatable."
)
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there, at /metrics.")
@click.option(
    "--max-crashes",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_CRASHES,
    show_default=True,
    help="Give up after so many crashes in a row without a commit in between.",
)
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
def command(
    file: Path,
    until_caught_up: bool,
    trigger: str | None,
    master: str,
    settings: tuple[str, ...],
    metrics: str | None,
    max_crashes: int,
    quiet: bool,
) -> None:
    """Run the pipeline in FILE, and start it again after a crash.

    FILE has a function `pipeline(spark)` that returns what `semel.spark.exactly_once` made, or a list of
    such. The session is made here. Ctrl-C and SIGTERM end it; a batch that is under way is aborted. What has
    not ended a minute later, or is asked twice, is killed.
    """
    if until_caught_up and trigger is not None:
        raise click.UsageError("--until-caught-up ends when all is read, so --trigger has no meaning with it")
    if wrong := [each for each in settings if "=" not in each]:
        raise click.UsageError(f"--set {wrong[0]}: it must be NAME=VALUE")
    arguments = [str(file.resolve()), "--master", master]
    arguments += [argument for setting in settings for argument in ("--setting", setting)]
    arguments += ["--until-caught-up"] if until_caught_up else []
    arguments += [] if trigger is None else ["--trigger", trigger]
    supervisor = Supervisor(arguments, max_crashes)
    display = ProgressDisplay(supervisor, is_shown=not quiet, is_terminal=sys.stderr.isatty())
    if metrics is not None:
        url = serve_metrics(metrics, supervisor)
        if not quiet:
            click.echo(f"metrics at {url}", err=True)
    if not quiet and sys.stderr.isatty():
        logging.getLogger("semel").addHandler(OverTheBar())
    signal.signal(signal.SIGTERM, lambda number, frame: supervisor.stop())
    signal.signal(signal.SIGINT, lambda number, frame: supervisor.stop())
    if not quiet:
        click.echo(f"starting Spark for {file.name}", err=True)
    code = supervisor.run(display.show)
    display.finish()
    # Of a pipeline that a signal has ended, the code is negative.
    sys.exit(code if code >= 0 else FAILED)


def serve_metrics(address: str, supervisor: Supervisor) -> str:
    """In a thread of its own, for as long as the process lives. Returns where they are."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--metrics {address!r}: it must be HOST:PORT")
    endpoint = MetricsEndpoint(
        host, int(port), lambda: render_metrics(dict(supervisor.latest), supervisor.restarts)
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="semel metrics", daemon=True).start()
    asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result()
    return f"http://{host}:{endpoint.port}/metrics"
