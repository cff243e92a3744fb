"""What Spark needs on this machine, what of it is there, and how to get the rest.

Needed are a Java, PySpark, pyarrow and pandas. Spark's own Kafka connector is not: the reader in Python
does without. Who wants it must bring its jars, and Maven Central does not have a whole set for every Spark:
what is known to work together is named here.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, TypeAlias

from semel.errors import ConfigError, how_to_install
from semel.spark.java import HOW_TO_GET_JAVA, MAX_TRIED_JAVA, Java, find_java
from semel.spark.workers import SPARK_HOME, WORKER_PYTHON

State: TypeAlias = Literal["ok", "warning", "missing", "optional"]

MIN_PYSPARK: Final = (4, 2)
MIN_PYARROW: Final = (21, 0)
MIN_NUMPY: Final = (2, 0)
# PySpark asks for it where data goes to Python as Arrow.
MIN_PANDAS: Final = (2, 2)
INSTALL: Final = how_to_install("spark")

JAR: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d+(?:\.\d+)+)\.jar")
CONNECTOR: Final = "spark-sql-kafka-0-10_2.13"
# The newest that Maven Central has of each: the connector for 4.3 is not there, nor any token provider after
# 4.0.0, which is why `spark.jars.packages` fails. Tried together with PySpark 4.3.0.
TRIED_JARS: Final = (
    f"org.apache.spark:{CONNECTOR}:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


@dataclass(slots=True, frozen=True)
class Check:
    """One thing that was looked at. `advice` says what to do where there is something to do."""

    name: str
    state: State
    found: str
    advice: str | None = None


def examine(jars: Sequence[Path] = ()) -> list[Check]:
    """Looks at everything. `jars` are folders that may hold the connector, besides Spark's own."""
    return [
        check_java(os.environ),
        check_package("pyspark", MIN_PYSPARK),
        check_package("pyarrow", MIN_PYARROW),
        check_package("numpy", MIN_NUMPY),
        check_package("pandas", MIN_PANDAS),
        check_worker_python(os.environ),
        check_connector([*_jar_folders(os.environ), *jars]),
    ]


def is_well(checks: Sequence[Check]) -> bool:
    """Whether a pipeline can run: what is optional, or only doubtful, does not stop it."""
    return all(check.state != "missing" for check in checks)


def check_java(environment: Mapping[str, str]) -> Check:
    try:
        java = find_java(environment)
    except ConfigError as error:
        return Check("java", "missing", "none", str(error))
    return _judge_java(java)


def _judge_java(java: Java) -> Check:
    found = f"{java.version} at {java.home} ({java.origin})"
    if not java.has_vector_module:
        found += ", behind a wrapper"
    if java.major > MAX_TRIED_JAVA:
        return Check(
            "java", "warning", found, f"newer than {MAX_TRIED_JAVA}, the last one tried: {HOW_TO_GET_JAVA}"
        )
    return Check("java", "ok", found)


def check_package(name: str, least: tuple[int, int]) -> Check:
    wanted = ".".join(str(part) for part in least)
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "missing", "none", f"{name} {wanted} or newer is needed: {INSTALL}")
    if _numbers(found)[:2] < least:
        return Check(name, "missing", found, f"{name} {wanted} or newer is needed: {INSTALL}")
    return Check(name, "ok", found)


def check_worker_python(environment: Mapping[str, str]) -> Check:
    """Spark's workers must run the same Python as the driver, with the same packages."""
    chosen = environment.get(WORKER_PYTHON)
    if chosen is None:
        return Check("worker python", "ok", f"{sys.executable} (set by Semel's own sessions)")
    if Path(chosen).resolve() == Path(sys.executable).resolve():
        return Check("worker python", "ok", f"{chosen} ({WORKER_PYTHON})")
    return Check(
        "worker python",
        "warning",
        f"{chosen} ({WORKER_PYTHON})",
        f"this is {sys.executable}: the other one must be Python {sys.version_info.major}."
        f"{sys.version_info.minor} too, and have semel, pyarrow, numpy and pandas",
    )


def check_connector(folders: Sequence[Path]) -> Check:
    """Spark's own Kafka connector, which must be whole if it is there."""
    wanted = [coordinates.split(":")[1] for coordinates in TRIED_JARS]
    found = {
        parsed["name"]: parsed["version"]
        for folder in folders
        for jar in sorted(folder.glob("*.jar"))
        if (parsed := JAR.fullmatch(jar.name)) is not None and parsed["name"] in wanted
    }
    if CONNECTOR not in found:
        return Check(
            "kafka connector", "optional", "none", f"the reader in Python needs none; {_how_to_get()}"
        )
    shown = ", ".join(f"{name} {found[name]}" for name in wanted if name in found)
    if absent := [name for name in wanted if name not in found]:
        return Check("kafka connector", "warning", shown, f"{', '.join(absent)} is missing; {_how_to_get()}")
    spark = _spark_version()
    if spark is not None and _numbers(found[CONNECTOR])[0] != _numbers(spark)[0]:
        return Check("kafka connector", "warning", shown, f"it is not for Spark {spark}; {_how_to_get()}")
    return Check("kafka connector", "ok", shown)


def _how_to_get() -> str:
    return (
        "to use Spark's own, copy each of "
        + ", ".join(TRIED_JARS)
        + " with `mvn dependency:copy -Dartifact=... -DoutputDirectory=jars`, and name them in `spark.jars`"
    )


def _spark_version() -> str | None:
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return None


def _jar_folders(environment: Mapping[str, str]) -> list[Path]:
    """Where Spark itself looks for jars: SPARK_HOME if there is one, else what came with PySpark."""
    if home := environment.get(SPARK_HOME):
        return [Path(home) / "jars"]
    package = find_spec("pyspark")
    return [] if package is None or package.origin is None else [Path(package.origin).parent / "jars"]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
