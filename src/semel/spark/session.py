"""Starting Spark on this machine: a Java, this Python for the workers, and settings for a small machine.

A pipeline that runs on a cluster brings its own session; nothing else of `semel.spark` asks for this one.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError
from semel.spark.java import find_java, home_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[*]"
DEFAULT_DRIVER_MEMORY: Final = "1g"
LOOPBACK: Final = "127.0.0.1"

# What a pipeline on one machine wants and Spark's defaults, made for clusters, do not give.
LOCAL_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # The files of the state stores are as many as these, in every batch.
    "spark.sql.shuffle.partitions": "4",
}
# Names of the machine may not resolve, and nobody outside has business with executors that are all here.
LOOPBACK_SETTINGS: Final[dict[str, str]] = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
}


def prepare_environment(java_home: Path | None = None) -> Path:
    """Makes Spark start on a Java that is there, and its workers on this Python; returns the Java's home.

    It must be called before the first session of the process. What the user has set of PYSPARK_PYTHON stays.
    """
    home = java_home or home_for_spark(find_java())
    os.environ["JAVA_HOME"] = str(home)
    # Workers would else take whatever `python3` there is on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    return home


def local_session(
    app_name: str,
    *,
    master: str = DEFAULT_MASTER,
    driver_memory: str = DEFAULT_DRIVER_MEMORY,
    settings: Mapping[str, str] | None = None,
    jars: Sequence[Path] = (),
    log_level: str = "WARN",
) -> "SparkSession":
    """A session on this machine, with the reader of topics registered. Settings given here win."""
    prepare_environment()
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(f"PySpark is missing ({error}): pip install 'semel[spark]'") from None
    from semel.spark.reader import register

    builder = SparkSession.builder.appName(app_name).master(master)
    builder = builder.config("spark.driver.memory", driver_memory)
    if jars:
        builder = builder.config("spark.jars", ",".join(str(jar) for jar in jars))
    loopback = LOOPBACK_SETTINGS if master.startswith("local") else {}
    for name, value in {**LOCAL_SETTINGS, **loopback, **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(log_level)
    register(spark)
    return spark
