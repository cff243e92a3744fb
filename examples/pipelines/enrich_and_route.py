"""Enrich and route: orders get the name of their country, and go to the topic of their region.

    for each in orders orders-europe orders-america orders-elsewhere; do semel topic create $each; done
    semel run examples/pipelines/enrich_and_route.py

Records name their topics: each is written exactly once, to all topics in one transaction.
"""

import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import coalesce, col, concat, from_json, lit, struct, to_json

from semel.sinks import KafkaSink
from semel.spark import ExactlyOnce, exactly_once, read

BOOTSTRAP = os.environ.get("BOOTSTRAP", "localhost:9092")
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")

COUNTRIES = [("AT", "Austria", "europe"), ("CL", "Chile", "america"), ("IS", "Iceland", "europe")]
ORDER = "id STRING, country STRING, cents INT"


def pipeline(spark: SparkSession) -> ExactlyOnce:
    countries = spark.createDataFrame(COUNTRIES, "country STRING, name STRING, region STRING")
    orders = read(spark, BOOTSTRAP, "orders").select(
        "key", from_json(col("value").cast("string"), ORDER).alias("order")
    )
    enriched = orders.select("key", "order.*").join(countries, "country", "left")
    routed = enriched.select(
        "key",
        to_json(struct("id", "cents", "country", "name")).alias("value"),
        concat(lit("orders-"), coalesce("region", lit("elsewhere"))).alias("topic"),
    )
    sink = KafkaSink(BOOTSTRAP, "orders-elsewhere", topic_column="topic")
    return exactly_once(routed, sink, name="enrich-and-route", checkpoint=f"{CHECKPOINTS}/enrich-and-route")
