"""A pipeline for `semel run`: its first life dies with -9 after a batch was committed, the next carry on."""

import os
import signal
from pathlib import Path

from pyspark.sql import SparkSession

import semel.spark
from semel.client.shared_transaction import SharedTransaction
from semel.sinks.kafka import KafkaSink

DIRECTORY = Path(os.environ["TEST_DIRECTORY"])
BOOTSTRAP = os.environ["TEST_BOOTSTRAP"]


class DyingOnce(KafkaSink):
    """Kills its process after the commit of batch 1, the first time."""

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        await super()._end(transaction, epoch)
        died = DIRECTORY / "died"
        if epoch == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def pipeline(spark: SparkSession) -> semel.spark.ExactlyOnce:
    orders = semel.spark.read(spark, BOOTSTRAP, "orders", maxOffsetsPerTrigger=50)
    sink = DyingOnce(BOOTSTRAP, "out")
    return semel.spark.exactly_once(orders, sink, name="supervised", checkpoint=DIRECTORY / "checkpoint")
