"""The demonstration of `script/run`: what it kills is killed, and nothing is lost or doubled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.postgres_server import find_binaries

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("sink", ["kafka", "postgres"])
def test_the_demonstration_survives_what_it_kills(sink: str) -> None:
    if sink == "postgres" and find_binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "demonstration" / "run.py"),
            "--sink",
            sink,
            "--orders",
            "20000",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exactly once" in done.stdout
    assert done.stdout.count("Spark driver") >= 2
    assert "of the broker" in done.stdout
