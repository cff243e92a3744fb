"""Processes that were sent SIGSTOP: each of their threads goes on for as long as it does not hear of it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.005


def freeze(pid: int) -> None:
    """Returns when nothing of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def wait_until_stopped(pid: int) -> None:
    """Until all threads of a process that was sent the signal are asleep, or gone."""
    while not all(state in "TZX" for state in _states(pid)):
        time.sleep(POLL_S)


def _states(pid: int) -> list[str]:
    """As /proc tells them: T is stopped, Z and X are dead."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states
