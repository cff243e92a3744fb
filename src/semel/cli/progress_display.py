"""How far pipelines are, on the screen: bars on a terminal, now and then a line elsewhere."""

import logging
import shutil
import time
from typing import Final, TextIO

import click

from semel.spark.progress import NO_EPOCH, Progress
from semel.spark.supervisor import Supervisor

CLEAR_LINE: Final = "\r\x1b[2K"
BAR_WIDTH: Final = 20
# Where there is no terminal, a line of progress comes at most so often.
LINE_INTERVAL_S: Final = 10.0


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
