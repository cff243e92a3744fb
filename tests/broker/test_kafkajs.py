"""kafkajs, the JavaScript client, against Semel: a small program of ours with one scenario a run.

The packages come from the npm registry once, into `.deps/js` of the checkout. Without Node.js, or where the
packages cannot be had, the tests are skipped and say why. kafkajs has no static membership.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from semel.embedded import Broker

CHECKOUT: Final = Path(__file__).parents[2]
SOURCES: Final = CHECKOUT / "tests" / "js"
PACKAGES: Final = CHECKOUT / ".deps" / "js"
INSTALL_TIMEOUT_S: Final = 300
RUN_TIMEOUT_S: Final = 60
SCENARIOS: Final = (
    "codecs",
    "records",
    "large",
    "group",
    "transactions",
    "admin",
    "reset",
    "policy",
    "partitions",
)


@cache
def why_no_packages() -> str | None:
    """Install the packages; the reason if that is not possible."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install nodejs npm)"
    wanted = (SOURCES / "package.json").read_text()
    installed = PACKAGES / "package.json"
    complete = PACKAGES / "complete"
    if complete.exists() and installed.read_text() == wanted:
        return None
    PACKAGES.mkdir(parents=True, exist_ok=True)
    installed.write_text(wanted)
    fetched = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=PACKAGES,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if fetched.returncode != 0:
        return f"the packages cannot be installed: {fetched.stderr.strip()[-500:]}"
    complete.touch()
    return None


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kafkajs(bootstrap: str, topic: str, scenario: str) -> None:
    missing = why_no_packages()
    if missing is not None:
        pytest.skip(missing)
    done = subprocess.run(
        ["node", str(SOURCES / "main.js"), scenario, bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env={**os.environ, "NODE_PATH": str(PACKAGES / "node_modules")},
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
