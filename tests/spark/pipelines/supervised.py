"""A pipeline for `semel run`, whose lives die with -9 where they are told to, and may be held in a batch.

TEST_DEATHS is a list such as `before-1 after-2`: before the end of batch 1 and after that of batch 2, each
once. Where TEST_GATE is given, rows wait until there is such a file; `begun` beside it says that they do.
"""

import os
import signal
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does

import semel.spark
from semel.client.shared_transaction import SharedTransaction
from semel.sinks.kafka import KafkaSink

DIRECTORY = Path(os.environ["TEST_DIRECTORY"])
BOOTSTRAP = os.environ["TEST_BOOTSTRAP"]
DEATHS = os.environ.get("TEST_DEATHS", "").split()
GATE = os.environ.get("TEST_GATE")
POLL_S = 0.05


class Mortal(KafkaSink):
    """Kills its process at each of its deaths, the first time."""

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        die_once(f"before-{epoch}")
        await super()._end(transaction, epoch)
        die_once(f"after-{epoch}")


def die_once(death: str) -> None:
    died = DIRECTORY / f"died-{death}"
    if death in DEATHS and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def held(orders: DataFrame, gate: Path) -> DataFrame:
    @F.udf("binary")
    def wait(value: bytes) -> bytes:
        (gate.parent / "begun").touch()
        while not gate.exists():
            time.sleep(POLL_S)
        return value

    return orders.select("key", wait("value").alias("value"))


def pipeline(spark: SparkSession) -> semel.spark.ExactlyOnce:
    orders = semel.spark.read(spark, BOOTSTRAP, "orders", maxOffsetsPerTrigger=50)
    rows = orders if GATE is None else held(orders, Path(GATE))
    sink = Mortal(BOOTSTRAP, "out")
    return semel.spark.exactly_once(rows, sink, name="supervised", checkpoint=DIRECTORY / "checkpoint")
