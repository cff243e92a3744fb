"""Starting Spark on this machine: a Java, this Python for the workers, and settings for a small machine.

A pipeline that runs on a cluster brings its own session; nothing else of `semel.spark` asks for this one.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError, how_to_install
from semel.spark.java import find_java, home_for_spark
from semel.spark.workers import SPARK_HOME, choose_worker_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_MASTER: Final = "local[*]"
LOOPBACK: Final = "127.0.0.1"
MASTERS: Final = re.compile(r"local([\[-].*\])?|spark://.+|yarn|k8s://.+")

# Wherever a pipeline runs: what it makes of a timestamp does not depend on where its driver is.
SETTINGS: Final[dict[str, str]] = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
# What a pipeline on one machine wants and Spark's defaults, made for clusters, do not give.
LOCAL_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    # The files of the state stores are as many as these, in every batch.
    "spark.sql.shuffle.partitions": "4",
    # Names of the machine may not resolve, and nobody outside has business with executors that are all here.
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    # Over TCP a task waits 40 ms for its rows, if they are few (docs/decisions/0014).
    "spark.python.unix.domain.socket.enabled": "true",
}

# Options for the driver's JVM that come before `spark.driver.extraJavaOptions`, so that the user's win.
SUBMIT_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
SPARKS_LOG_SETTINGS: Final = "log4j2.properties"


def is_local(master: str) -> bool:
    """Whether all of Spark's processes are on this machine."""
    return master.startswith("local")


def settings_for(master: str) -> dict[str, str]:
    """What is set unless the user does: little on a cluster, which has settings of its own."""
    return {**SETTINGS, **LOCAL_SETTINGS} if is_local(master) else dict(SETTINGS)


def limit_log() -> None:
    """Makes Spark say less on the driver, unless the user has settings for that. Before the first session.

    As a setting it would take the place of what `spark-defaults.conf` has: trust stores, proxies, Kerberos.
    """
    option = f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"
    given = os.environ.get(SUBMIT_OPTIONS, "")
    if option not in given and not _has_log_settings():
        os.environ[SUBMIT_OPTIONS] = f"{option} {given}".strip()


def _has_log_settings() -> bool:
    """Whether the user has told Spark what to say, in the place where Spark looks."""
    home = os.environ.get(SPARK_HOME)
    places = [os.environ.get("SPARK_CONF_DIR"), None if home is None else f"{home}/conf"]
    return any((Path(place) / SPARKS_LOG_SETTINGS).exists() for place in places if place)


def prepare_environment(master: str = DEFAULT_MASTER) -> None:
    """Makes Spark start on a Java that is there, and its workers on this Python.

    It must be called before the first session of the process. What the user has set of PYSPARK_PYTHON stays.
    """
    os.environ["JAVA_HOME"] = str(home_for_spark(find_java()))
    choose_worker_python(os.environ, is_local=is_local(master))
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def require_classic(given: "SparkSession | DataFrame") -> None:
    """Refuses what is of Spark Connect, before it is asked for what is not there."""
    if type(given).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            f"this {type(given).__name__} is of Spark Connect, where foreachBatch runs in another process "
            "than the driver, without the sinks and without a handle on the query, and where the reader of "
            "topics cannot be made known to the session in the JVM: start a classic session, without remote()"
        )


def local_session(
    app_name: str,
    *,
    master: str = DEFAULT_MASTER,
    driver_memory: str | None = None,
    settings: Mapping[str, str] | None = None,
    jars: Sequence[Path] = (),
    log_level: str = "WARN",
) -> "SparkSession":
    """A session with its driver here, and the reader of topics registered. Settings given here win."""
    if not MASTERS.fullmatch(master):
        raise ConfigError(
            f"Spark knows no master {master!r}: it must be local[*], spark://HOST:PORT, yarn or k8s://URL"
        )
    prepare_environment(master)
    limit_log()
    if is_local(master):
        # Executors of `local-cluster` are processes of their own, and would listen to other machines.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(f"PySpark is missing ({error}): {how_to_install('spark')}") from None
    from semel.spark.reader import register

    builder = SparkSession.builder.appName(app_name).master(master)
    if driver_memory is not None:
        builder = builder.config("spark.driver.memory", driver_memory)
    if jars:
        builder = builder.config("spark.jars", ",".join(str(jar) for jar in jars))
    for name, value in {**settings_for(master), **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    require_classic(spark)  # SPARK_REMOTE and SPARK_API_MODE make it another one
    spark.sparkContext.setLogLevel(log_level)
    register(spark)
    return spark
