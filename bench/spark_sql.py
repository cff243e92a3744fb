"""Exactly-once into a database beside Spark's own JDBC writer, which knows no streams and is at-least-once.

    .venv/bin/python bench/spark_sql.py                        PostgreSQL, 2 million rows of 5 columns
    .venv/bin/python bench/spark_sql.py --database mariadb
    .venv/bin/python bench/spark_sql.py --rows 200000 --rounds 2

A stream of files goes to a table, in one batch, by each way in turn, warm, on one session. Spark's writer is
called in `foreachBatch`, as everyone does. CPU is that of the driver with all below it, and of the server.
It needs `mvn` for the JDBC drivers, once, and PostgreSQL or MariaDB of the machine, which runs in a directory
of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cpu_meter import CpuMeter
from rounds import spread, take_turns, times_as_fast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sinks"))

from mariadb_server import MariaDBServer, find_server

from semel.sinks import MySQLSink, PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.spark import exactly_once
from semel.spark.session import local_session
from semel.testing.postgres_server import PostgresServer, find_binaries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POM: Final = Path(__file__).parent / "jdbc"
JARS: Final = Path(__file__).parents[1] / ".deps" / "jdbc"
FILES: Final = 2
TIMEOUT_S: Final = 900
COLUMNS: Final = (
    "id bigint, customer varchar(40), amount double precision, at {timestamp}, payload varchar(200)"
)


class Figures(NamedTuple):
    """What one run took."""

    elapsed_s: float
    cpu_s: float


class Database(NamedTuple):
    """A server, and the ways to get rows into it."""

    server: PostgresServer | MariaDBServer
    timestamp: str
    jdbc: dict[str, dict[str, str]]
    sink: Callable[[str], TransactionalSink]


def postgres() -> Database:
    binaries = find_binaries()
    if binaries is None:
        sys.exit("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer(binaries)
    server.start()
    at = dict(part.split("=", 1) for part in server.dsn.split())
    options = {
        "url": f"jdbc:postgresql://{at['host']}:{at['port']}/{at['dbname']}",
        "user": at["user"],
        "driver": "org.postgresql.Driver",
    }
    rewriting = {**options, "reWriteBatchedInserts": "true"}
    ways = {"JDBC": options, "JDBC, reWriteBatchedInserts": rewriting}
    return Database(server, "timestamptz", ways, lambda table: PostgresSink(server.dsn, table))


def mariadb() -> Database:
    binary = find_server()
    if binary is None:
        sys.exit("MariaDB is not installed (Debian: mariadb-server-core)")
    server = MariaDBServer(binary)
    server.start()
    server.empty()
    options = {
        # Spark has no dialect for MariaDB's own URLs.
        "url": f"jdbc:mysql://127.0.0.1:{server.port}/semel?permitMysqlScheme&user=root",
        "driver": "org.mariadb.jdbc.Driver",
    }
    return Database(server, "timestamp(6)", {"JDBC": options}, lambda table: MySQLSink(server.url(), table))


DATABASES: Final = {"postgres": postgres, "mariadb": mariadb}


def drivers() -> list[Path]:
    """The JDBC drivers, from Maven Central, once."""
    if not list(JARS.glob("*.jar")):
        if shutil.which("mvn") is None:
            sys.exit("mvn is needed to fetch the JDBC drivers (apt install maven)")
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        subprocess.run(command, cwd=POM, check=True)
    return sorted(JARS.glob("*.jar"))


def write_files(spark: SparkSession, directory: Path, rows: int) -> None:
    spark.range(rows).repartition(FILES).selectExpr(
        "id",
        "concat('customer-', id % 9973) AS customer",
        "rand(1) AS amount",
        "timestamp_millis(1700000000000 + id) AS at",
        "repeat(lpad(string(id), 8, '0'), 15) AS payload",
    ).write.parquet(str(directory))


class Bench(NamedTuple):
    """A session, files with so many rows, a database for them, and a place for checkpoints."""

    spark: SparkSession
    files: Path
    rows: int
    database: Database
    scratch: Path
    meter: CpuMeter


def run(bench: Bench, way: str) -> Figures:
    """All rows once, into a table of their own."""
    spark, database, files, scratch = bench.spark, bench.database, str(bench.files), bench.scratch
    table = f"t{uuid.uuid4().hex[:8]}"
    database.server.query(f"CREATE TABLE {table} ({COLUMNS.format(timestamp=database.timestamp)})")
    began, before = time.perf_counter(), bench.meter.total_s()
    stream = spark.readStream.schema(spark.read.parquet(files).schema).parquet(files)
    query: Any
    if way in database.jdbc:
        writer = stream.writeStream.foreachBatch(jdbc_writer(database.jdbc[way], table))
        writer = writer.option("checkpointLocation", str(scratch / table)).trigger(availableNow=True)
        query = writer.start()
    else:
        pipeline = exactly_once(stream, database.sink(table), name=table, checkpoint=scratch / table)
        query = pipeline.start("availableNow")
    assert query.awaitTermination(TIMEOUT_S)
    elapsed_s = time.perf_counter() - began
    figures = Figures(elapsed_s, bench.meter.total_s() - before)
    ((count,),) = database.server.query(f"SELECT count(*) FROM {table}")
    assert count == bench.rows, f"{count} of {bench.rows}"
    database.server.query(f"DROP TABLE {table}")
    return figures


def jdbc_writer(options: dict[str, str], table: str) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        batch.write.format("jdbc").options(**options, dbtable=table).mode("append").save()

    return write


def report(database: str, results: dict[str, list[Figures]], rows: int) -> None:
    """Beside others: how many times as fast `exactly_once` is."""
    print(
        f"{database:<32}{'k rows/s (least, most)':>26}{'k rows per CPU s':>18}{'exactly_once beside it':>26}"
    )
    ours = [each.elapsed_s for each in results["exactly_once"]]
    for way, rounds in results.items():
        per_cpu = statistics.median(rows / each.cpu_s / 1000 for each in rounds)
        rates = spread([rows / each.elapsed_s / 1000 for each in rounds])
        faster = times_as_fast(ours, [each.elapsed_s for each in rounds])
        print(f"{way:<32}{rates:>26}{per_cpu:>18,.0f}{faster:>26}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--database", choices=tuple(DATABASES), default="postgres")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-rounds", type=int, default=2, help="before those that count")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    spark = local_session("bench", driver_memory="2g", jars=drivers(), log_level="ERROR")
    database = DATABASES[given.database]()
    ways = [*database.jdbc, "exactly_once"]
    try:
        with tempfile.TemporaryDirectory(prefix="semel-bench-") as scratch, CpuMeter() as meter:
            files = Path(scratch) / "files"
            write_files(spark, files, given.rows)
            bench = Bench(spark, files, given.rows, database, Path(scratch), meter)
            turns = {way: partial(run, bench, way) for way in ways}
            results = take_turns(turns, given.rounds, given.warm_rounds)
    finally:
        database.server.close()
        spark.stop()
    report(given.database, results, given.rows)
    if given.json is not None:
        rounds = {way: [each._asdict() for each in of] for way, of in results.items()}
        given.json.write_text(json.dumps({"rows": given.rows, "ways": rounds}))


if __name__ == "__main__":
    main()
