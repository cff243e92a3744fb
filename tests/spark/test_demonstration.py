"""The demonstration of `script/run`: what it kills is killed, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.postgres_server import find_binaries

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
SEMEL = (sys.executable, "-c", "from semel.cli.root import main; main()")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "examples" / "demonstration" / "run.py"),
            *arguments,
            "--orders",
            "20000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def check(shown: str) -> None:
    assert "exactly once" in shown
    assert "NOT exactly once" not in shown
    assert shown.count("Spark driver") >= 2
    assert "of the broker" in shown


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_demonstration_into_a_table_survives_what_it_kills() -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    demonstration = start("--sink", "postgres")
    shown, _ = demonstration.communicate(timeout=TIMEOUT_S)
    assert demonstration.returncode == 0, shown
    check(shown)


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_demonstration_survives_what_it_kills_and_is_kept_for_a_look_round() -> None:
    demonstration = start("--keep")
    assert demonstration.stdout is not None
    shown = ""
    for line in demonstration.stdout:
        shown += line
        if "semel group list" in line:
            break
    check(shown)
    try:
        offered = re.search(r"semel (sink list -b \S+)", shown)
        assert offered, shown
        semel = [*SEMEL, *offered[1].split(), "-o", "json"]
        (sink,) = json.loads(subprocess.run(semel, capture_output=True, check=True).stdout)
        assert sink["epoch"] > 0
    finally:
        demonstration.send_signal(signal.SIGINT)
        demonstration.communicate(timeout=TIMEOUT_S)
    assert demonstration.returncode == 130
    assert subprocess.run(semel, capture_output=True, check=False).returncode != 0, (
        "the broker is still there"
    )
