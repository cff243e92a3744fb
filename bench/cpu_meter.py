"""CPU time of a process and of everything below it, what has ended meanwhile included.

The kernel adds what a process has used to the account of its parent when that waits for it. The daemon that
starts Spark's Python workers never waits: it ignores SIGCHLD, and what a worker has used is gone with it. So
a thread looks at the processes every other second, and what such a worker had used when last seen is kept.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import psutil

LOOK_INTERVAL_S: Final = 2.0
# As a bit of SigIgn in /proc/PID/status.
SIGCHLD_BIT: Final = 1 << 16


class Seen(NamedTuple):
    """A process, when it was last looked at."""

    cpu_s: float
    is_waited_for: bool


class CpuMeter:
    """Of the process `pid`, or of this one: Spark and all servers of a benchmark are below it."""

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[psutil.Process, Seen] = {}
        self._lost_s = 0.0
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="CPU meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def total_s(self) -> float:
        """User and system time up to now."""
        with self._looking:
            self._look()
            return self._lost_s + sum(each.cpu_s for each in self._seen.values())

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_INTERVAL_S):
            self.total_s()

    def _look(self) -> None:
        now = self._everyone()
        gone = self._seen.keys() - now.keys()
        self._lost_s += sum(self._seen[each].cpu_s for each in gone if not self._seen[each].is_waited_for)
        self._seen = now

    def _everyone(self) -> dict[psutil.Process, Seen]:
        """All that live, at a moment at which nobody ends: who does would count twice, or not at all."""
        while True:
            found = self._family()
            now = {process: seen for process in found if (seen := _look_at(process)) is not None}
            if len(now) == len(found) and self._family() >= found:
                return now

    def _family(self) -> set[psutil.Process]:
        return {self._root, *self._root.children(recursive=True)}


def _look_at(process: psutil.Process) -> Seen | None:
    try:
        times = process.cpu_times()
        used = times.user + times.system + times.children_user + times.children_system
        return Seen(used, not _ignores_children(process.ppid()))
    except psutil.NoSuchProcess:
        return None


def _ignores_children(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) & SIGCHLD_BIT)
