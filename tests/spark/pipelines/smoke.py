import sys, time, logging
logging.basicConfig(level=logging.INFO)
import semel.spark
from semel.sinks import KafkaSink
from spark_cases import driver_session, create_topic, produce, Row
from semel.embedded import Broker
import tempfile
spark = driver_session()
with Broker() as broker:
    b = broker.bootstrap
    create_topic(b, "in", 3); create_topic(b, "out", 4)
    produce(b, "in", [Row(b"v%d" % i, b"k%d" % i) for i in range(1000)])
    df = semel.spark.read(spark, b, "in", maxOffsetsPerTrigger=400)
    with tempfile.TemporaryDirectory() as d:
        for key in ("key", None):
            t0 = time.time()
            q = semel.spark.exactly_once(df, KafkaSink(b, "out", key=key), name=f"smoke{key}", checkpoint=f"{d}/{key}").start(trigger="availableNow")
            q.awaitTermination()
            print(q.attempts, q.skipped, time.time()-t0, q.sinks[0].metrics, q.lastProgress["batchId"], q.lastProgress["durationMs"])
            rows = semel.spark.read_batch(spark, b, "out").collect()
            print(len(rows), len({r.value for r in rows}), sorted({r.partition for r in rows}))
