"""Pipelines from one topic into targets of every kind, which run on until one after the other has failed.

    python copied.py BOOTSTRAP CHECKPOINTS TARGET…

`semel`, `kafka`, `postgres` and `mariadb` get every row. `state0`, `state` and `state2` are topics that get
every value once: their queries remember them, each in another format.

Two of these programs on copies of the same checkpoints are two drivers under one name. With TEST_HOLD, the
row of this value waits until there is a file `go` beside the checkpoints; `held-<target>` says that it does.
Whatever ends a pipeline, or keeps it from its start, is printed. A file `stop` ends the others.
"""

import os
import sys
import time
from pathlib import Path

from crash_cases import STATES, keep_state
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import driver_session

import semel.spark
from semel.errors import SemelError
from semel.sinks.kafka import KafkaSink
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.sink import TransactionalSink

POLL_S = 0.05
# The slots of the tasks that are held are lost to the others.
SLOTS = "local[8]"


def sink_of(target: str, bootstrap: str) -> TransactionalSink:
    if target == "postgres":
        return PostgresSink(os.environ["TEST_POSTGRES"], "output", columns={"value": "v"})
    if target == "mariadb":
        return MySQLSink(os.environ["TEST_MYSQL"], "output", columns={"value": "v"})
    topic = f"copied-{target}" if target in STATES else "copied"
    return KafkaSink(os.environ["TEST_KAFKA"] if target == "kafka" else bootstrap, topic)


def held(rows: DataFrame, value: str, place: Path, target: str) -> DataFrame:
    @F.udf("binary")
    def wait(given: bytes) -> bytes:
        if given == value.encode():
            (place / f"held-{target}").touch()
            while not (place / "go").exists():
                time.sleep(POLL_S)
        return given

    return rows.select("key", wait("value").alias("value"))


def remembering(spark: SparkSession, bootstrap: str, target: str) -> DataFrame:
    session = spark.newSession()
    keep_state(session, STATES[target])
    return semel.spark.read(session, bootstrap, "orders").dropDuplicates(["value"])


def start(spark: SparkSession, bootstrap: str, checkpoints: Path, target: str) -> semel.spark.PipelineQuery:
    rows = (
        remembering(spark, bootstrap, target)
        if target in STATES
        else semel.spark.read(spark, bootstrap, "orders")
    )
    if value := os.environ.get("TEST_HOLD"):
        rows = held(rows, value, checkpoints.parent, target)
    sink, checkpoint = sink_of(target, bootstrap), checkpoints / target
    return semel.spark.exactly_once(rows, sink, name=target, checkpoint=checkpoint).start("200 milliseconds")


def main(bootstrap: str, given: str, *targets: str) -> None:
    checkpoints = Path(given)
    spark = driver_session(SLOTS)
    running = []
    for target in targets:
        try:
            running.append(start(spark, bootstrap, checkpoints, target))
        except SemelError as error:
            tell(target, error)
    while running and not (checkpoints.parent / "stop").exists():
        for query in list(running):
            try:
                query.awaitTermination(POLL_S)
            except SemelError as error:
                tell(query.name, error)
                running.remove(query)
    for query in running:
        query.stop()
        in_vain = query.attempts - query.batches
        print(f"{query.name}: stopped, and wrote {in_vain} batches in vain", flush=True)


def tell(target: str, error: SemelError) -> None:
    print(f"{target}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
