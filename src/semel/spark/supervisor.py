"""Keeps a pipeline alive: starts it in a process of its own, and again after a crash, on the same checkpoint.

What the dead process left open is aborted when the next one opens its sinks. Back-off grows from one crash
to the next, and starts anew when an epoch was committed in between; after so many crashes in a row that had
no commit in between, it gives up. An exit that says that another start would not help (wrong settings, a
marker that does not fit, another owner) is final.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from semel.spark.progress import Progress, decode
from semel.spark.running import FINAL_EXIT

LOGGER: Final = logging.getLogger(__name__)

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
DEFAULT_MAX_CRASHES: Final = 10
STOP_TIMEOUT_S: Final = 60.0
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
        on_progress: Callable[[Progress], None],
        max_crashes: int = DEFAULT_MAX_CRASHES,
        *,
        life: Sequence[str] = LIFE,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._command = [*life, *arguments]
        self._first_backoff_s = first_backoff_s
        self._on_progress = on_progress
        self._max_crashes = max_crashes
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_committed = False
        self.restarts = 0
        self.latest: dict[str, Progress] = {}

    def stop(self) -> None:
        """Asks the pipeline to end; `run` returns when it has. May be called in a signal handler."""
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """The exit code of the last life: 0 if it was told to stop, or has read all there was."""
        crashes = 0
        while True:
            code = self._live()
            if self._stopping.is_set() and code == -signal.SIGTERM:
                return 0  # it was asked before it could listen, and had nothing open
            if code in (0, FINAL_EXIT) or self._stopping.is_set():
                return code
            crashes = 1 if self._has_committed else crashes + 1
            if crashes >= self._max_crashes:
                LOGGER.error("the pipeline ended with %d, crash %d in a row: giving up", code, crashes)
                return code
            pause_s = backoff_s(crashes, self._first_backoff_s)
            LOGGER.warning("the pipeline ended with %d; it is started again in %g s", code, pause_s)
            if self._stopping.wait(pause_s):
                return 0
            self.restarts += 1

    def _live(self) -> int:
        """One process, from its start to its end."""
        self._has_committed = False
        reading, writing = os.pipe()
        with os.fdopen(reading) as lines:
            try:
                self._process = subprocess.Popen(
                    [*self._command, "--progress-fd", str(writing)],
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            if self._stopping.is_set():
                self.stop()  # it was asked for while there was no process
            self._listen(lines)
        return self._wait()

    def _listen(self, lines: TextIO) -> None:
        """Until the process, and all that inherited the pipe from it, are gone."""
        for line in lines:
            progress = decode(line)
            self._has_committed = self._has_committed or progress.commits > 0
            self.latest[progress.pipeline] = progress
            self._on_progress(progress)

    def _wait(self) -> int:
        assert self._process is not None
        give_up = time.monotonic() + STOP_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()
