"""Java consumers in groups: three share and one leaves, a static member comes back, offsets are reset.

And where consumers begin that have no offset, or one that is gone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Final

import pytest
from client_java import CLASSES, JARS, Java

from semel.embedded import Broker

TIMEOUT_S: Final = 90


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    # Members of the newer protocol learn of changes with their heartbeats, as often as the broker says.
    with Broker(settings={"group.consumer.heartbeat.interval.ms": 100}) as broker:
        yield broker.bootstrap


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("scenario", ["share", "static", "reset", "policy"])
def test_java_members(bootstrap: str, topic: str, scenario: str, protocol: str) -> None:
    missing = Java.missing()
    if missing is not None:
        pytest.skip(missing)
    java = ["java", "-XX:TieredStopAtLevel=1", "-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    done = subprocess.run(
        [*java, "-cp", f"{CLASSES}:{JARS}/*", "Members", scenario, bootstrap, topic, protocol],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
