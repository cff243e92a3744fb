"""What the README shows happens: its tour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from semel.embedded import Broker

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 60
TOUR = re.compile(r"^```sh\n(semel topic create .*?)^```\n+```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tour_prints_what_the_readme_says() -> None:
    tour = TOUR.search((ROOT / "README.md").read_text())
    assert tour is not None
    with Broker() as broker:
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SEMEL_BOOTSTRAP": broker.bootstrap,
        }
        done = subprocess.run(
            ["sh", "-e", "-c", tour.group(1)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )
    assert (done.returncode, done.stdout) == (0, tour.group(2)), done.stderr
