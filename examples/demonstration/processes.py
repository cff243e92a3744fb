"""The broker and the Spark driver as child processes that can be killed and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

SEMEL: Final = str(Path(sys.executable).with_name("semel"))
PIPELINE: Final = str(Path(__file__).with_name("pipeline.py"))
STOP_TIMEOUT_S: Final = 60
LOG_LINES_SHOWN: Final = 30


class ChildProcess:
    """A command with a log. Killing it kills its children too: a Spark driver is a Python and a JVM."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self.process: subprocess.Popen[str] | None = None

    def spawn(self, command: list[str]) -> subprocess.Popen[str]:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        return self.process

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """As with `kill -9`: nothing is said goodbye to."""
        self.end(signal.SIGKILL)

    def log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join([f"the log of the {self.name} ends with:", *lines[-LOG_LINES_SHOWN:]])


class BrokerProcess(ChildProcess):
    """`semel serve`, on its directory and, from its first start on, on its port."""

    def __init__(self, directory: Path) -> None:
        super().__init__("broker", directory)
        self._data = str(directory / "data")
        self.bootstrap = "127.0.0.1:0"

    def start(self) -> float:
        """Returns how long it took until clients could connect."""
        began = time.monotonic()
        process = self.spawn([SEMEL, "serve", "--data", self._data, "--listen", self.bootstrap])
        assert process.stdout is not None
        ready = re.match(r"ready (\S+)", process.stdout.readline())
        if ready is None:
            self.kill()
            raise SystemExit(f"the broker did not start; {self.log_end()}")
        self.bootstrap = ready.group(1)
        return time.monotonic() - began


class DriverProcess(ChildProcess):
    """The pipeline on Spark, always on the same checkpoint."""

    def __init__(self, directory: Path, dsn: str | None) -> None:
        super().__init__("driver", directory)
        self.checkpoint = directory / "checkpoint"
        self._dsn = dsn

    def start(self, bootstrap: str) -> None:
        command = [sys.executable, PIPELINE, bootstrap, str(self.checkpoint)]
        self.spawn(command if self._dsn is None else [*command, self._dsn])
