"""Spark's own Kafka connector: its jars, from Maven Central, once, into `.deps/spark` of the checkout."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[2]
POM: Final = Path(__file__).parent / "jars"
JARS: Final = CHECKOUT / ".deps" / "spark"
CONNECTOR: Final = "spark-sql-kafka-0-10_2.13-*.jar"
DOWNLOAD_TIMEOUT_S: Final = 600


@cache
def why_no_connector() -> str | None:
    """Fetch the jars; the reason if that is not possible."""
    if list(JARS.glob(CONNECTOR)):
        return None
    if shutil.which("mvn") is None:
        return "mvn is not installed (apt install maven)"
    fetched = subprocess.run(
        ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"],
        cwd=POM,
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if fetched.returncode == 0:
        return None
    return f"the jars could not be fetched: {(fetched.stderr or fetched.stdout).strip()[-500:]}"


def connector_jars() -> list[Path]:
    """The jars for `spark.jars`; none where they cannot be had."""
    return sorted(JARS.glob("*.jar")) if why_no_connector() is None else []
