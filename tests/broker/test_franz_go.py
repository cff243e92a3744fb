"""franz-go, the Go client, against Semel: a small program of ours with one scenario a run.

The module comes from the Go proxy; the program is built once, into `.deps/go` of the checkout. Without Go, or
where the module cannot be had, the tests are skipped and say why.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest

CHECKOUT: Final = Path(__file__).parents[2]
SOURCES: Final = CHECKOUT / "tests" / "go"
PROGRAM: Final = CHECKOUT / ".deps" / "go" / "franz"
BUILD_TIMEOUT_S: Final = 600
RUN_TIMEOUT_S: Final = 90
SCENARIOS: Final = (
    "versions",
    "codecs",
    "records",
    "large",
    "group",
    "group-848",
    "static",
    "transactions",
    "admin",
    "reset",
    "policy",
    "partitions",
    "quotas",
)


@cache
def why_no_program() -> str | None:
    """Build the program; the reason if that is not possible."""
    if shutil.which("go") is None:
        return "go is not installed (https://go.dev/doc/install, 1.26 or newer)"
    built = subprocess.run(
        ["go", "build", "-o", str(PROGRAM), "."],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    return None if built.returncode == 0 else f"the Go program cannot be built: {built.stderr.strip()[-500:]}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_franz_go(bootstrap: str, topic: str, scenario: str) -> None:
    missing = why_no_program()
    if missing is not None:
        pytest.skip(missing)
    done = subprocess.run(
        [str(PROGRAM), scenario, bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
