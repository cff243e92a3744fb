"""`semel verify` accepts a sound broker, also one that is killed all the time, and finds out the others."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_process import SEMEL, free_port
from kafka_process import KafkaProcess

KILLS = int(os.environ.get("TEST_VERIFY_KILLS", "4"))
"""How often the broker is killed; CI says 30."""
RUN_TIMEOUT_S = 540
"""Far more than is needed, for machines that are busy with other tests."""
SHORT = ("--for", "5s")


class ShellBroker:
    """A broker that is killed and started by shell commands, as a user of `verify` would write them."""

    def __init__(self, directory: Path, fault: str = "none") -> None:
        self.bootstrap = f"127.0.0.1:{free_port()}"
        self.log_path = directory / "log"
        self._pid_path = directory / "pid"
        serve = [SEMEL, "serve", "--listen", self.bootstrap, "--data", str(directory / "data")]
        ready = shlex.quote(str(directory / "ready"))
        self.kill_command = f"kill -9 $(cat {shlex.quote(str(self._pid_path))})"
        self.restart_command = (
            f": > {ready}; SEMEL_TESTING=1 setsid {shlex.join(serve)} --set testing.fault={fault} "
            f"> {ready} 2>> {shlex.quote(str(self.log_path))} < /dev/null & "
            f"echo $! > {shlex.quote(str(self._pid_path))}; "
            f"for i in $(seq 600); do grep -q ^ready {ready} && exit 0; sleep 0.05; done; exit 1"
        )

    def start(self) -> ShellBroker:
        done = subprocess.run(self.restart_command, shell=True, check=False, timeout=90)
        assert done.returncode == 0, self.log_path.read_text()
        return self

    def kill(self) -> None:
        os.kill(int(self._pid_path.read_text()), signal.SIGKILL)


@pytest.fixture
def shell_broker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ShellBroker]:
    broker = ShellBroker(tmp_path, getattr(request, "param", "none")).start()
    yield broker
    broker.kill()
    print(broker.log_path.read_text())


def verify(bootstrap: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    done = subprocess.run(
        [SEMEL, "verify", "--bootstrap", bootstrap, "--output", "json", *options],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout)


def test_a_sound_broker_keeps_every_promise(shell_broker: ShellBroker) -> None:
    code, report = verify(shell_broker.bootstrap, *SHORT)
    assert code == 0
    assert report["counter_example"] is None
    assert report["rounds"] == 1
    assert report["committed"] > 10
    assert report["aborted"] > 2
    assert report["records"] > 20
    assert report["client_kills"] > 0
    assert "this is a bug" not in shell_broker.log_path.read_text()


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_a_broker_that_is_killed_all_the_time_keeps_every_promise(shell_broker: ShellBroker) -> None:
    code, report = verify(
        shell_broker.bootstrap,
        *("--for", "400s", "--kills", str(KILLS), "--kill-every", "1.5s"),
        *("--producers", "3", "--stages", "1", "--kill-clients-every", "10s"),
        *("--kill", shell_broker.kill_command, "--restart", shell_broker.restart_command),
    )
    assert code == 0, report["counter_example"]
    assert report["broker_kills"] == KILLS
    assert report["committed"] > 10 * KILLS
    assert "this is a bug" not in shell_broker.log_path.read_text()


@pytest.mark.parametrize("shell_broker", ["skip-marker", "lose-dedup", "show-past-lso"], indirect=True)
def test_a_broker_with_a_planted_fault_is_found_out(shell_broker: ShellBroker) -> None:
    """The fourth fault, show-before-durable, needs a crash at the right moment: the simulation finds it."""
    code, report = verify(
        shell_broker.bootstrap, "--for", "10s", "--cut-connections-every", "0.1s", "--kill-clients-every", "0"
    )
    assert code == 1
    assert "unit" in report["counter_example"]["text"] or "hangs" in report["counter_example"]["text"]


def test_a_planted_fault_is_refused_outside_of_tests(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    done = subprocess.run(
        [SEMEL, "serve", "--data", str(tmp_path / "data"), "--set", "testing.fault=skip-marker"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=kept,
    )
    assert done.returncode == 2
    assert "SEMEL_TESTING=1" in done.stderr


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_apache_kafka_can_be_verified_as_well(kafka_broker: KafkaProcess) -> None:
    code, report = verify(kafka_broker.bootstrap, "--for", "20s")
    assert code == 0, report["counter_example"]
    assert report["committed"] > 5
