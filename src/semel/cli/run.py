"""`semel run`: keep a pipeline on Spark alive, and show how far it is."""

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import click

from semel.errors import ConfigError
from semel.server.metrics_endpoint import MetricsEndpoint
from semel.spark.progress import Progress, render_metrics
from semel.spark.supervisor import DEFAULT_MAX_CRASHES, Supervisor

CLEAR_LINE: Final = "\r\x1b[2K"


@click.command
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--until-caught-up", is_flag=True, help="Read what is there now, and end.")
@click.option("--trigger", help="How often a batch is begun, such as '5 seconds'; at once if not given.")
@click.option("--master", default="local[*]", show_default=True, help="Spark's master.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; repeatable."
)
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there, at /metrics.")
@click.option(
    "--max-crashes",
    type=click.IntRange(min=0),
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
    such. The session is made here. Ctrl-C and SIGTERM end it; a batch that is under way is aborted.
    """
    if until_caught_up and trigger is not None:
        raise click.UsageError("--until-caught-up ends when all is read, so --trigger has no meaning with it")
    if wrong := [each for each in settings if "=" not in each]:
        raise click.UsageError(f"--set {wrong[0]}: it must be NAME=VALUE")
    arguments = [str(file.resolve()), "--master", master]
    arguments += [argument for setting in settings for argument in ("--setting", setting)]
    arguments += ["--until-caught-up"] if until_caught_up else []
    arguments += [] if trigger is None else ["--trigger", trigger]
    line = ProgressLine(is_shown=not quiet and sys.stderr.isatty())
    supervisor = Supervisor(arguments, line.show, max_crashes)
    line.supervisor = supervisor
    if metrics is not None:
        serve_metrics(metrics, supervisor)
    signal.signal(signal.SIGTERM, lambda number, frame: supervisor.stop())
    signal.signal(signal.SIGINT, lambda number, frame: supervisor.stop())
    code = supervisor.run()
    line.finish(is_quiet=quiet)
    sys.exit(code)


class ProgressLine:
    """One line on the terminal, for all pipelines of the file."""

    def __init__(self, *, is_shown: bool) -> None:
        self.supervisor: Supervisor | None = None
        self._is_shown = is_shown

    def show(self, progress: Progress) -> None:
        if self._is_shown:
            click.echo(CLEAR_LINE + self._text()[:150], nl=False, err=True)

    def finish(self, *, is_quiet: bool) -> None:
        if self._is_shown:
            click.echo(CLEAR_LINE, nl=False, err=True)
        if not is_quiet and self.supervisor is not None and self.supervisor.latest:
            click.echo(self._text())

    def _text(self) -> str:
        assert self.supervisor is not None
        restarts = f" | {self.supervisor.restarts} restarts" if self.supervisor.restarts else ""
        return " | ".join(progress_text(each) for each in self.supervisor.latest.values()) + restarts


def progress_text(progress: Progress) -> str:
    lag = "" if progress.lag is None else f", lag {progress.lag:,}"
    return (
        f"{progress.pipeline}: batch {progress.batch}, epoch {progress.committed_epoch} committed, "
        f"{progress.rows:,} rows, "
        f"{progress.rows_per_s:,.0f} rows/s{lag}"
    )


def serve_metrics(address: str, supervisor: Supervisor) -> None:
    """In a thread of its own, for as long as the process lives."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--metrics {address!r}: it must be HOST:PORT")
    endpoint = MetricsEndpoint(
        host, int(port), lambda: render_metrics(dict(supervisor.latest), supervisor.restarts)
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="semel metrics", daemon=True).start()
    asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result()
