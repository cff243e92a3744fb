"""A program that runs epochs, as a child: it dies or falls asleep where it is told to, and says so before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from stopped import wait_until_stopped

DRIVER_TIMEOUT_S = 60


class Driver:
    """The program; it says `at STEP` before it stops there."""

    def __init__(self, program: Path, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def wait_until_stopped(self) -> None:
        """Until it sleeps at its step."""
        assert self.read_line().startswith("at "), "it never reached its step"
        wait_until_stopped(self._process.pid)

    def wake(self) -> str:
        """What it says when it goes on."""
        self._process.send_signal(signal.SIGCONT)
        return self.last_words()

    def last_words(self) -> str:
        said, _ = self._process.communicate(timeout=DRIVER_TIMEOUT_S)
        return said

    @property
    def exit_code(self) -> int:
        return self._process.wait(DRIVER_TIMEOUT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
