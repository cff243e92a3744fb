"""The pipeline of the demonstration: orders are priced on Spark, exactly once.

    python pipeline.py BOOTSTRAP CHECKPOINT [POSTGRES_DSN]

It knows nothing of faults: whoever runs it kills it, and starts it again with the same checkpoint.
"""

from __future__ import annotations

import sys
from typing import Final

from pyspark.sql.functions import col, concat_ws, from_json

from semel.sinks import KafkaSink, PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.spark import exactly_once, read
from semel.spark.session import local_session

ORDERS: Final = "orders"
PRICED: Final = "priced"
NAME: Final = "demonstration"
ORDER_SCHEMA: Final = "id STRING, quantity INT, cents INT"
MAX_ORDERS_A_BATCH: Final = 8_000


def run(bootstrap: str, checkpoint: str, dsn: str | None) -> None:
    spark = local_session(NAME, log_level="ERROR")
    orders = read(spark, bootstrap, ORDERS, maxOffsetsPerTrigger=MAX_ORDERS_A_BATCH)
    order = from_json(col("value").cast("string"), ORDER_SCHEMA)
    priced = orders.select(order.alias("order")).select(
        col("order.id").alias("id"), (col("order.quantity") * col("order.cents")).cast("long").alias("cents")
    )
    sink: TransactionalSink
    if dsn is None:
        priced = priced.select(
            col("id").cast("binary").alias("key"), concat_ws(" ", "id", "cents").cast("binary").alias("value")
        )
        sink = KafkaSink(bootstrap, PRICED)
    else:
        sink = PostgresSink(dsn, PRICED)
    exactly_once(priced, sink, name=NAME, checkpoint=checkpoint).start("500 milliseconds").awaitTermination()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
