"""The crash matrix: the driver is killed with -9 at every step of an epoch, and the output equals the input.

Each test is a chain of lives of one program (`pipelines/crashing.py`). A life finishes what the one before
left behind, and dies at its own step; the last one reads to the end. What is in the output topics is then
compared with the input, by content.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from spark_cases import Row, StartDriver, committed_records, create_topic, produce_transaction

from semel.testing.postgres_server import PostgresServer

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
from mariadb_server import MariaDBServer, mariadb, mariadb_server  # noqa: F401
from postgres_server import postgres, postgres_cluster  # noqa: F401

# A chain has up to eight lives, each with a JVM of its own.
pytestmark = pytest.mark.timeout(900)

Content: TypeAlias = tuple[bytes | None, bytes | None]

CRASHING: Final = Path(__file__).parent / "pipelines" / "crashing.py"
STEPS: Final = (
    "before_begin",
    "amid_tasks",
    "after_tasks",
    "before_marker",
    "before_end",
    "after_end",
    "in_recovery",
)
SQL_STEPS: Final = ("amid_tasks", "after_tasks", "before_marker", "before_end", "after_end", "in_recovery")
# Spark gives a worker ten seconds to start.
TOO_SLOW: Final = "Python worker failed to connect back"
MAX_EARLY_ENDS: Final = 4
BEGIN_MS: Final = 1_700_000_000_000
STEP_MS: Final = 250
WINDOW_S: Final = 5
ORDERS: Final = 400


def feed(bootstrap: str) -> None:
    """Orders, payments and numbers, in transactions, every fourth of which is aborted."""
    for topic, partitions in (("orders", 3), ("payments", 2), ("numbers", 2)):
        create_topic(bootstrap, topic, partitions, retention_ms="-1")
    for start in range(0, ORDERS, 80):
        some = range(start, start + 80)
        produce_transaction(bootstrap, "orders", [order(i) for i in some])
        produce_transaction(bootstrap, "payments", [payment(i) for i in some])
        produce_transaction(bootstrap, "numbers", [number(i) for i in some])
        for topic in ("orders", "payments", "numbers"):
            aborted = [Row(b"999999", b"aborted", timestamp_ms=time_of(i)) for i in some]
            produce_transaction(bootstrap, topic, aborted, commit=False)
    # Far in the future: closes every window.
    produce_transaction(
        bootstrap, "numbers", [Row(b"0", b"end", partition=p, timestamp_ms=time_of(10_000)) for p in (0, 1)]
    )


def time_of(i: int) -> int:
    return BEGIN_MS + i * STEP_MS


def order(i: int) -> Row:
    return Row(b"order %d" % i, b"key %d" % i, timestamp_ms=time_of(i))


def payment(i: int) -> Row:
    return Row(b"payment %d" % i, b"key %d" % i, timestamp_ms=time_of(i + 4))


def number(i: int) -> Row:
    return Row(b"%d" % i, timestamp_ms=time_of(i), partition=i % 2)


def expected_records() -> Counter[Content]:
    return Counter((b"key %d" % i, b"ORDER %d" % i) for i in range(ORDERS))


def expected_values() -> Counter[Content]:
    return Counter((None, b"ORDER %d" % i) for i in range(ORDERS))


def expected_join() -> Counter[Content]:
    return Counter((b"key %d" % i, b"order %d+payment %d" % (i, i)) for i in range(ORDERS))


def expected_windows() -> Counter[Content]:
    sums: dict[int, list[int]] = {}
    for i in range(ORDERS):
        start = time_of(i) // 1000 // WINDOW_S * WINDOW_S
        sums.setdefault(start, []).append(i)
    return Counter(
        (str(start).encode(), json.dumps({"count": len(of), "sum": sum(of)}, separators=(",", ":")).encode())
        for start, of in sums.items()
    )


EXPECTED: Final = {
    "keyed": expected_records,
    "unkeyed": expected_values,
    "windows": expected_windows,
    "windows2": expected_windows,
    "join": expected_join,
}


def check_output(bootstrap: str, pipeline: str) -> None:
    found = Counter(
        (record.key, record.value) for _, record in committed_records(bootstrap, f"{pipeline}-out")
    )
    check(pipeline, found, EXPECTED[pipeline]())


def check(pipeline: str, found: Counter[Content], expected: Counter[Content]) -> None:
    assert found - expected == Counter(), f"{pipeline}: doubled, or never written"
    assert expected - found == Counter(), f"{pipeline}: lost"


def live_through(
    start_driver: StartDriver,
    bootstrap: str,
    directory: Path,
    pipelines: tuple[str, ...],
    deaths: Iterable[str],
    **environment: str,
) -> None:
    """One life for each death, then one that reads to the end."""
    arguments = (CRASHING, bootstrap, directory / "checkpoints", *pipelines)
    for life, death in enumerate(deaths):
        # Another number of shuffle partitions in every life: a replayed batch is cut differently.
        given = {"TEST_DIE": death, "TEST_SHUFFLE_PARTITIONS": str(2 + life % 2), **environment}
        live(start_driver, arguments, given, until="dying")
    live(start_driver, arguments, {"TEST_PER_BATCH": str(10 * ORDERS), **environment}, until="done")


def live(
    start_driver: StartDriver, arguments: tuple[object, ...], environment: dict[str, str], until: str
) -> None:
    """One life, that ends as it should. On a busy machine Spark may give up early: that is a crash, too."""
    for _ in range(MAX_EARLY_ENDS):
        driver = start_driver(*arguments, environment=environment)
        driver.wait()
        if until in driver.log.splitlines():
            return
        assert TOO_SLOW in driver.log, f"{environment} ended without {until!r}:\n{driver.log[-6000:]}"
    raise AssertionError(f"{MAX_EARLY_ENDS} drivers in a row were too slow")


def prepare(bootstrap: str, pipelines: Iterable[str]) -> None:
    feed(bootstrap)
    for pipeline in pipelines:
        create_topic(bootstrap, f"{pipeline}-out", 4)


def survive(
    start_driver: StartDriver,
    bootstrap: str,
    directory: Path,
    pipelines: tuple[str, ...],
    deaths: Iterable[str],
) -> None:
    """From topics to topics."""
    prepare(bootstrap, pipelines)
    live_through(start_driver, bootstrap, directory, pipelines, deaths)
    for pipeline in pipelines:
        check_output(bootstrap, pipeline)


def test_stateless_pipelines_survive_a_driver_killed_at_every_step(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    deaths = [f"keyed:{step}" for step in STEPS]
    survive(start_driver, broker.bootstrap, tmp_path, ("keyed", "unkeyed"), deaths)


def test_windows_survive_with_state_of_both_formats(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    deaths = ["windows2:after_tasks", "windows:before_end", "windows2:after_end", "windows:after_end"]
    survive(start_driver, broker.bootstrap, tmp_path, ("windows2", "windows"), deaths)


def test_a_join_of_streams_survives(broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path) -> None:
    deaths = ["join:after_tasks", "join:before_end", "join:after_end"]
    survive(start_driver, broker.bootstrap, tmp_path, ("join",), deaths)


def test_pipelines_survive_on_apache_kafka(
    kafka_broker: KafkaProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    deaths = ["keyed:after_tasks", "windows:before_end", "keyed:after_end", "keyed:in_recovery"]
    survive(start_driver, kafka_broker.bootstrap, tmp_path, ("keyed", "windows"), deaths)


def test_pipelines_into_postgresql_survive(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    feed(broker.bootstrap)
    postgres.query("CREATE TABLE orders (id text, content text)")
    postgres.query("CREATE TABLE totals (key text, value text)")
    deaths = [f"table:{step}" for step in SQL_STEPS] + ["totals:before_end", "totals:after_end"]
    pipelines = ("table", "totals")
    live_through(start_driver, broker.bootstrap, tmp_path, pipelines, deaths, TEST_POSTGRES=postgres.dsn)
    check_tables(postgres.query)


def test_pipelines_into_mariadb_survive(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    mariadb: MariaDBServer,  # noqa: F811
) -> None:
    feed(broker.bootstrap)
    mariadb.query("CREATE TABLE orders (id varchar(40), content varchar(40))")
    mariadb.query("CREATE TABLE totals (`key` varchar(40), value varchar(100))")
    deaths = ["mysql:amid_tasks", "mysql:after_tasks", "mysql_totals:before_end", "mysql:after_end"]
    pipelines = ("mysql", "mysql_totals")
    live_through(start_driver, broker.bootstrap, tmp_path, pipelines, deaths, TEST_MYSQL=mariadb.url())
    check_tables(mariadb.query)


def check_tables(query: Callable[[str], list[tuple[Any, ...]]]) -> None:
    for table, expected in (("orders", expected_records()), ("totals", expected_windows())):
        rows = query(f"SELECT * FROM {table}")
        check(table, Counter((str(key).encode(), str(value).encode()) for key, value in rows), expected)
