"""A topic and a table together: valid orders go to the topic `valid` and to the table `orders`.

    for each in orders valid; do semel topic create $each; done
    createdb shop
    psql shop -c 'CREATE TABLE orders (id text PRIMARY KEY, country text, cents int)'
    POSTGRES=postgresql:///shop semel run examples/pipelines/topic_and_table.py

Each has every order exactly once, by its own marker. They are not atomic together: after a crash one may be
ahead by a batch, until the pipeline runs again.
"""

import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json, struct, to_json

from semel.sinks import KafkaSink, PostgresSink
from semel.spark import ExactlyOnce, exactly_once, read

BOOTSTRAP = os.environ.get("BOOTSTRAP", "localhost:9092")
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")
POSTGRES = os.environ.get("POSTGRES", "postgresql:///shop")

ORDER = "id STRING, country STRING, cents INT"


def pipeline(spark: SparkSession) -> ExactlyOnce:
    orders = read(spark, BOOTSTRAP, "orders").select(
        from_json(col("value").cast("string"), ORDER).alias("order")
    )
    valid = orders.select("order.*").where("cents > 0")
    both = valid.select("id", "country", "cents", to_json(struct("id", "country", "cents")).alias("value"))
    columns = {"id": "id", "country": "country", "cents": "cents"}
    sinks = [
        KafkaSink(BOOTSTRAP, "valid", key="id"),
        PostgresSink(POSTGRES, "orders", columns=columns),
    ]
    return exactly_once(both, sinks, name="topic-and-table", checkpoint=f"{CHECKPOINTS}/topic-and-table")
