"""Commands run against the fake broker of the client's tests."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "client"))

from fake_broker import FakeBroker, ThreadedBroker

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with ThreadedBroker(FakeBroker({"t": 2})) as running:
        yield running


@pytest.fixture
def semel(broker: FakeBroker) -> Run:
    """Runs the real command as a process."""

    def run(
        *arguments: str, stdin: bytes = b"", timeout_s: float = 30
    ) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [sys.executable, "-c", "from semel.cli import main; main()", *arguments],
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env={"SEMEL_BOOTSTRAP": broker.bootstrap, "PATH": "/usr/bin:/bin"},
            check=False,
        )

    return run
