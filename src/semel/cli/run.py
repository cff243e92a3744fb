"""`semel run`: keep a pipeline on Spark alive, and show how far it is."""

import asyncio
import logging
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final, TextIO

import click

from semel.cli.root import FAILED
from semel.errors import ConfigError
from semel.server.metrics_endpoint import MetricsEndpoint
from semel.spark.progress import NO_EPOCH, Progress, render_metrics
from semel.spark.session import DEFAULT_MASTER
from semel.spark.supervisor import DEFAULT_MAX_CRASHES, Supervisor

CLEAR_LINE: Final = "\r\x1b[2K"
BAR_WIDTH: Final = 20
# Where there is no terminal, a line of progress comes at most so often.
LINE_INTERVAL_S: Final = 10.0


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


class OverTheBar(logging.StreamHandler[TextIO]):
    """Takes the bar's line for what is to be told."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream.write(CLEAR_LINE)
        super().emit(record)


class ProgressDisplay:
    """How far the pipelines of the file are: a bar for each on a terminal, now and then a line elsewhere."""

    def __init__(self, supervisor: Supervisor, *, is_shown: bool, is_terminal: bool) -> None:
        self._supervisor = supervisor
        self._is_shown = is_shown
        self._is_terminal = is_terminal
        self._fills: dict[str, Fill] = {}
        self._told_epochs: dict[str, int] = {}
        self._quiet_until: dict[str, float] = {}

    def show(self, progress: Progress) -> None:
        fill = self._fills.setdefault(progress.pipeline, Fill())
        fill.take(progress)
        if not self._is_shown:
            return
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            # The cursor goes back to the beginning: what the pipeline itself has to say is put over the bar.
            click.echo(f"{CLEAR_LINE}{self._bars()[:width]}\r", nl=False, err=True)
        elif self._is_news(progress):
            click.echo(f"{progress_text(progress)}{fill.percent()}", err=True)

    def finish(self) -> None:
        if self._is_shown and self._is_terminal:
            click.echo(CLEAR_LINE, nl=False, err=True)
        if self._is_shown and self._latest():
            click.echo(" | ".join(progress_text(each) for each in self._latest()) + self._restarts())

    def _is_news(self, progress: Progress) -> bool:
        """Whether it committed an epoch since its last line, and that was a while ago."""
        now, pipeline = time.monotonic(), progress.pipeline
        told = self._told_epochs.get(pipeline, NO_EPOCH)
        if progress.committed_epoch == told or now < self._quiet_until.get(pipeline, now):
            return False
        self._told_epochs[pipeline] = progress.committed_epoch
        self._quiet_until[pipeline] = now + LINE_INTERVAL_S
        return True

    def _bars(self) -> str:
        bars = (
            f"{each.pipeline} {self._fills[each.pipeline].bar()}{progress_figures(each)}"
            for each in self._latest()
        )
        return " | ".join(bars) + self._restarts()

    def _latest(self) -> list[Progress]:
        return list(self._supervisor.latest.values())

    def _restarts(self) -> str:
        restarts = self._supervisor.restarts
        return f" | {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""


class Fill:
    """How much has been read of what was there: of the largest lag since the pipeline last had none."""

    def __init__(self) -> None:
        self._largest = 0
        self._fraction: float | None = None

    def take(self, progress: Progress) -> None:
        if progress.lag is None:
            self._fraction = None  # where the end is, is not known
            return
        # What the last batch has read was lag before it, and the first batch is told of when it is over.
        self._largest = max(self._largest, progress.lag + progress.read)
        self._fraction = 1.0 - progress.lag / self._largest if self._largest else 1.0
        if progress.lag == 0:
            self._largest = 0

    def bar(self) -> str:
        if self._fraction is None:
            return ""
        full = int(self._fraction * BAR_WIDTH)
        return f"[{'#' * full}{'-' * (BAR_WIDTH - full)}]{int(self._fraction * 100):4d} % "

    def percent(self) -> str:
        return "" if self._fraction is None else f", {int(self._fraction * 100)} % read"


def progress_text(progress: Progress) -> str:
    return f"{progress.pipeline}: {progress_figures(progress)}"


def progress_figures(progress: Progress) -> str:
    batch = "no batch yet" if progress.batch < 0 else f"batch {progress.batch}"
    epoch = "no epoch" if progress.committed_epoch == NO_EPOCH else f"epoch {progress.committed_epoch}"
    skipped = f", {progress.skips} skipped" if progress.skips else ""
    lag = "" if progress.lag is None else f", lag {progress.lag:,}"
    return (
        f"{batch}{skipped}, {epoch} committed, {progress.rows:,} rows, {progress.rows_per_s:,.0f} rows/s "
        f"read{lag}"
    )


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
