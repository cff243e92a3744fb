"""A real broker process for tests: on a free port, killed and restarted at will, cleaned up by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Final

import psutil

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 30.0
SEMEL: Final = str(Path(sys.executable).with_name("semel"))


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BrokerProcess:
    """`semel serve` as a user runs it. The port and the directory stay the same across restarts."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        *,
        in_memory: bool = False,
        log_path: Path | None = None,
    ) -> None:
        self.directory = directory
        self.settings = dict(settings or {})
        self.in_memory = in_memory
        self.port = free_port()
        self.log_path = log_path or directory.with_name(directory.name + ".log")
        self._process: subprocess.Popen[str] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Everything logged so far, by all the processes started here."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def command(self) -> list[str]:
        given = {**self.settings}
        arguments = [SEMEL, "serve", "--listen", self.bootstrap]
        arguments += ["--in-memory"] if self.in_memory else ["--data", str(self.directory)]
        for name, value in given.items():
            arguments += ["--set", f"{name}={value}"]
        return arguments

    def start(self) -> BrokerProcess:
        """Start, and wait for the line that says clients can connect."""
        assert not self.is_alive
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment()
            )
        line = _first_line(self._process, START_TIMEOUT_S)
        if not line.startswith("ready"):
            self.kill()
            raise AssertionError(f"the broker said {line!r} instead of ready; its log:\n{self.log}")
        return self

    def kill(self) -> None:
        """kill -9: no chance to say goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code, once the process has ended."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def restart(self) -> None:
        """Kill -9 and start again."""
        self.kill()
        self.start()

    def run_to_end(self) -> subprocess.CompletedProcess[str]:
        """Run the command where it is expected to fail by itself."""
        return subprocess.run(
            self.command,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
            env=_environment(),
        )


def _environment() -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The first line on stdout; empty if there is none in time."""
    lines: Queue[str] = Queue()
    threading.Thread(target=_read_line, args=(process, lines), daemon=True).start()
    try:
        return lines.get(timeout=timeout_s)
    except Empty:
        return ""


def _read_line(process: subprocess.Popen[str], lines: Queue[str]) -> None:
    assert process.stdout is not None
    lines.put(process.stdout.readline())


StartBroker = Callable[..., BrokerProcess]
"""The fixture `start_broker`: starts a process in a directory of its own, with settings as keywords."""
