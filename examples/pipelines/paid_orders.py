"""A join of two streams: orders and their payments, matched by key if they are paid within ten minutes.

    for each in orders payments paid; do semel topic create $each; done
    semel run examples/pipelines/paid_orders.py

An order that is not paid in time is dropped from Spark's state once the watermarks have passed it.
"""

import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, concat_ws, expr

from semel.sinks import KafkaSink
from semel.spark import ExactlyOnce, exactly_once, read

BOOTSTRAP = os.environ.get("BOOTSTRAP", "localhost:9092")
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")

IN_TIME = "order_key = payment_key AND paid BETWEEN ordered AND ordered + INTERVAL 10 MINUTES"


def pipeline(spark: SparkSession) -> ExactlyOnce:
    orders = (
        read(spark, BOOTSTRAP, "orders")
        .select(col("key").alias("order_key"), col("value").alias("order"), col("timestamp").alias("ordered"))
        .withWatermark("ordered", "10 minutes")
    )
    payments = (
        read(spark, BOOTSTRAP, "payments")
        .select(
            col("key").alias("payment_key"), col("value").alias("payment"), col("timestamp").alias("paid")
        )
        .withWatermark("paid", "10 minutes")
    )
    paid = orders.join(payments, expr(IN_TIME)).select(
        col("order_key").alias("key"),
        concat_ws(" ", col("order").cast("string"), col("payment").cast("string")).alias("value"),
    )
    sink = KafkaSink(BOOTSTRAP, "paid")
    return exactly_once(paid, sink, name="paid-orders", checkpoint=f"{CHECKPOINTS}/paid-orders")
