"""Keeps a pipeline alive: starts it in a process of its own, and again after a crash, on the same checkpoint.

What the dead process left open is aborted when the next one opens its sinks. Back-off grows from one crash
to the next, and starts anew when an epoch was committed in between; after so many crashes in a row that had
no commit in between, it gives up. An exit that says that another start would not help (wrong settings, a
marker that does not fit, another owner, a row that the target cannot take) is final.

A process that is asked to end has a limited time for it; then, or when it is asked once more, it is killed.
What it had open is aborted by the next start, as after any other death.
"""

import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from semel.spark.progress import Progress, decode
from semel.spark.running import FINAL_EXIT

log = logging.getLogger(__name__)

Show: TypeAlias = Callable[[Progress], None]

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
DEFAULT_MAX_CRASHES: Final = 10
# From the request to end, or from the end of what it tells, to the end of the process.
STOP_TIMEOUT_S: Final = 60.0
# One Ctrl-C may arrive twice: from the terminal, and from a parent that hands it on.
ECHO_S: Final = 0.5
POLL_S: Final = 0.05
# More than a pipe holds: one read takes all that a dead process has left in it.
MAX_READ_BYTES: Final = 1 << 20
# One life of a pipeline: the arguments follow.
LIFE: Final = (sys.executable, "-m", "semel.spark.running")


def backoff_s(crashes: int, first_s: float = FIRST_BACKOFF_S) -> float:
    """How long to wait after so many crashes in a row."""
    return min(first_s * 2.0 ** (crashes - 1), MAX_BACKOFF_S)


class Supervisor:
    """One pipeline file and its lives, one after the other."""

    def __init__(
        self,
        arguments: Sequence[str],
        max_crashes: int = DEFAULT_MAX_CRASHES,
        *,
        life: Sequence[str] = LIFE,
        first_backoff_s: float = FIRST_BACKOFF_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._command = [*life, *arguments]
        self._first_backoff_s = first_backoff_s
        self._stop_timeout_s = stop_timeout_s
        self._max_crashes = max_crashes
        self._is_stopping = False
        self._asked_at = -math.inf
        self._kill_at = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._has_committed = False
        self.restarts = 0
        self.latest: dict[str, Progress] = {}

    def stop(self) -> None:
        """Asks the pipeline to end, and kills it when asked again; `run` returns when it has ended.

        May be called in a signal handler, also while it is in another: it takes no lock, and the killing is
        left to `run`, which looks often.
        """
        now = time.monotonic()
        if now < self._asked_at + ECHO_S:
            return
        self._kill_at = now if self._is_stopping else now + self._stop_timeout_s
        self._asked_at, self._is_stopping = now, True
        self._ask()

    def _ask(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def run(self, show: Show) -> int:
        """The exit code of the last life: 0 if it was told to stop, or has read all there was."""
        crashes = 0
        while True:
            code = self._live(show)
            if self._is_stopping and code == -signal.SIGTERM:
                return 0  # it was asked before it could listen, and had nothing open
            if code in (0, FINAL_EXIT) or self._is_stopping:
                return code
            crashes = 1 if self._has_committed else crashes + 1
            if crashes >= self._max_crashes:
                log.error("the pipeline %s, crash %d in a row: giving up", _ending(code), crashes)
                return code
            pause_s = backoff_s(crashes, self._first_backoff_s)
            log.warning("the pipeline %s; it is started again in %g s", _ending(code), pause_s)
            self._pause(pause_s)
            if self._is_stopping:
                return 0
            self.restarts += 1

    def _pause(self, seconds: float) -> None:
        """Not for longer than until it is asked to stop."""
        until = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < until:
            time.sleep(POLL_S)

    def _live(self, show: Show) -> int:
        """One process, from its start to its end."""
        self._has_committed = False
        reading, writing = os.pipe()
        try:
            try:
                self._process = subprocess.Popen(
                    [*self._command, "--progress-fd", str(writing)],
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            if self._is_stopping:
                self._ask()  # it was asked for while there was no process
            return self._follow(self._process, _ProgressPipe(reading), show)
        finally:
            os.close(reading)

    def _follow(self, process: subprocess.Popen[bytes], pipe: "_ProgressPipe", show: Show) -> int:
        """Listens until the process is gone. One that ought to be gone by now is killed."""
        while process.poll() is None:
            self._take_progress(pipe.lines(POLL_S), show)
            if time.monotonic() >= min(self._kill_at, pipe.ended_at + self._stop_timeout_s):
                _kill(process)
                break
        code = process.wait()
        # Not until all that inherited the pipe are gone: what they do is no concern of ours.
        self._take_progress(pipe.lines(0.0), show)
        return code

    def _take_progress(self, lines: list[str], show: Show) -> None:
        for line in lines:
            progress = decode(line)
            self._has_committed = self._has_committed or progress.commits > 0
            self.latest[progress.pipeline] = progress
            show(progress)


def _ending(code: int) -> str:
    return f"ended with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its JVM, which is of its group: that may be what does not end."""
    log.warning("the pipeline does not end, and is killed; what it has open, the next start aborts")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _ProgressPipe:
    """What comes through a pipe, line by line; it is never waited for longer than asked."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._begun = b""
        self.ended_at = math.inf

    def lines(self, timeout_s: float) -> list[str]:
        """The lines that are whole by now. Those that are not are kept, and lost if their writer dies."""
        if self.ended_at < math.inf:
            time.sleep(timeout_s)
            return []
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return []
        some = os.read(self._pipe, MAX_READ_BYTES)
        if not some:
            self.ended_at = time.monotonic()
        *whole, self._begun = (self._begun + some).split(b"\n")
        return [line.decode() for line in whole]
