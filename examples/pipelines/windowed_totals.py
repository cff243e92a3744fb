"""Windowed totals: the turnover of each minute, in a table of PostgreSQL that is brought up to date.

    semel topic create orders
    createdb shop
    psql shop -c 'CREATE TABLE totals (minute timestamptz PRIMARY KEY, orders bigint, cents bigint)'
    POSTGRES=postgresql:///shop semel run examples/pipelines/windowed_totals.py

Totals change while their minute lasts: `update` gives each change, and the sink replaces the row.
"""

import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, from_json, window
from pyspark.sql.functions import sum as sum_of

from semel.sinks import PostgresSink
from semel.spark import ExactlyOnce, exactly_once, read

BOOTSTRAP = os.environ.get("BOOTSTRAP", "localhost:9092")
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")
POSTGRES = os.environ.get("POSTGRES", "postgresql:///shop")

ORDER = "id STRING, country STRING, cents INT"


def pipeline(spark: SparkSession) -> ExactlyOnce:
    orders = read(spark, BOOTSTRAP, "orders").select(
        "timestamp", from_json(col("value").cast("string"), ORDER).alias("order")
    )
    totals = (
        orders.withWatermark("timestamp", "1 minute")
        .groupBy(window("timestamp", "1 minute").alias("window"))
        .agg(count("*").alias("orders"), sum_of("order.cents").alias("cents"))
        .select(col("window.start").alias("minute"), "orders", "cents")
    )
    sink = PostgresSink(POSTGRES, "totals", mode="upsert", keys=["minute"])
    checkpoint = f"{CHECKPOINTS}/windowed-totals"
    return exactly_once(totals, sink, name="windowed-totals", checkpoint=checkpoint, output_mode="update")
