"""The examples of the README and of the pages on pipelines and on the reader, as they stand there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_process import BrokerProcess
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import Row, committed_records, create_topic, produce

import semel.spark
from row_checks import check_rows
from semel.sinks import PostgresSink
from semel.spark.running import load
from semel.testing.postgres_server import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT: Final = Path(__file__).parents[2]
LARGE: Final = [b"%d" % i * 200 for i in range(5)]
SMALL: Final = [b"%d" % i for i in range(5)]


def examples(page: str, broker: BrokerProcess, directory: Path) -> list[str]:
    """With the places of this test in those of the page."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [
        each.replace("localhost:9092", broker.bootstrap).replace('"ck/', f'"{directory}/') for each in blocks
    ]


def feed(broker: BrokerProcess) -> None:
    create_topic(broker.bootstrap, "orders", 2)
    produce(broker.bootstrap, "orders", [Row(value, b"k") for value in LARGE + SMALL])


def values(broker: BrokerProcess, topic: str) -> Counter[bytes | None]:
    return Counter(record.value for _, record in committed_records(broker.bootstrap, topic))


def test_the_pipeline_of_the_readme_counts_into_a_table(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, postgres: PostgresServer
) -> None:
    feed(broker)
    (table,) = re.findall(r"`(CREATE TABLE .*?)`", (ROOT / "README.md").read_text())
    postgres.query(table)
    pipeline = examples("README.md", broker, tmp_path)[0].replace(".start()", ".start('availableNow')")
    pipeline = pipeline.replace("semel.spark.exactly_once(", "query = semel.spark.exactly_once(")
    names: dict[str, Any] = {
        "semel": semel,
        "spark": spark,
        "dsn": postgres.dsn,
        "PostgresSink": PostgresSink,
    }
    exec(compile(pipeline, "README.md", "exec"), names)
    assert names["query"].awaitTermination()
    check_rows(map(tuple, postgres.query("SELECT key, count FROM totals")), [(b"k", len(LARGE + SMALL))])


def test_the_first_pipeline_moves_large_orders(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    feed(broker)
    create_topic(broker.bootstrap, "large-orders", 3)
    file = tmp_path / "large_orders.py"
    file.write_text(examples("docs/spark.md", broker, tmp_path)[0])
    (pipeline,) = load(str(file), spark)
    assert pipeline.start("availableNow").awaitTermination()
    check_rows(values(broker, "large-orders"), LARGE)


def test_several_sinks_have_every_row(
    spark: SparkSession,
    broker: BrokerProcess,
    tmp_path: Path,
    postgres: PostgresServer,
) -> None:
    feed(broker)
    create_topic(broker.bootstrap, "valid", 3)
    postgres.query("CREATE TABLE valid (id text)")
    names: dict[str, Any] = {"__name__": "docs"}
    for block in examples("docs/spark.md", broker, tmp_path)[:2]:
        exec(compile(block, "spark.md", "exec"), names)
    rows = semel.spark.read(spark, broker.bootstrap, "orders").select(
        F.col("value").cast("string").alias("id"), "value"
    )
    assert names["both"](rows, postgres.dsn).start("availableNow").awaitTermination()
    check_rows(values(broker, "valid"), LARGE + SMALL)
    in_table = postgres.query("SELECT id FROM valid")
    check_rows((text.encode() for (text,) in in_table), LARGE + SMALL)


def test_the_reader_reads_a_stream_and_what_is_there_now(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    feed(broker)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(examples("docs/spark_reader.md", broker, tmp_path)[0], "spark_reader.md", "exec"), names)
    assert names["orders"].isStreaming
    check_rows((bytes(row.value) for row in names["so_far"].collect()), LARGE + SMALL)
