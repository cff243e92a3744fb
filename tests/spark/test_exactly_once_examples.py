"""The pipelines in examples/pipelines, run as `semel run` runs them, on a session that tests share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from broker_process import BrokerProcess
from spark_cases import Row, committed_records, create_topic, produce

from row_checks import about_rows, check_rows
from semel.spark.running import load
from semel.testing.postgres_server import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES: Final = Path(__file__).parents[2] / "examples" / "pipelines"
BEGIN_MS: Final = 1_794_000_000_000
COUNTRIES: Final = ("AT", "CL", "IS", "ZZ")
REGIONS: Final = {"AT": "europe", "CL": "america", "IS": "europe", "ZZ": "elsewhere"}
NAMES: Final = {"AT": "Austria", "CL": "Chile", "IS": "Iceland"}
ORDERS: Final = 200


def order_json(i: int) -> dict[str, object]:
    return {"id": f"o{i}", "country": COUNTRIES[i % 4], "cents": i}


def enriched(i: int) -> dict[str, object]:
    """With the name of its country, if that has one."""
    order = order_json(i)
    name = NAMES.get(str(order["country"]))
    return order if name is None else {**order, "name": name}


def feed(bootstrap: str) -> None:
    for topic in ("orders", "payments"):
        create_topic(bootstrap, topic, 3, retention_ms="-1")
    payments = [Row(b"paid", b"o%d" % i, timestamp_ms=BEGIN_MS + i * 1000 + 500) for i in range(ORDERS)]
    feed_orders(bootstrap, range(ORDERS))
    produce(bootstrap, "payments", payments)


def feed_orders(bootstrap: str, numbers: Iterable[int]) -> None:
    orders = [
        Row(json.dumps(order_json(i)).encode(), b"o%d" % i, timestamp_ms=BEGIN_MS + i * 1000) for i in numbers
    ]
    produce(bootstrap, "orders", orders)


@pytest.fixture(scope="module")
def fed_broker(tmp_path_factory: pytest.TempPathFactory) -> BrokerProcess:
    process = BrokerProcess(tmp_path_factory.mktemp("examples") / "broker").start()
    feed(process.bootstrap)
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def _places(fed_broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSTRAP", fed_broker.bootstrap)
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))


def run(example: str, spark: SparkSession) -> None:
    (pipeline,) = load(str(EXAMPLES / example), spark)
    assert pipeline.start("availableNow").awaitTermination()


def values(bootstrap: str, topic: str) -> list[bytes]:
    return [record.value or b"" for _, record in committed_records(bootstrap, topic)]


def test_orders_are_enriched_and_routed_to_the_topic_of_their_region(
    spark: SparkSession, fed_broker: BrokerProcess
) -> None:
    for region in set(REGIONS.values()):
        create_topic(fed_broker.bootstrap, f"orders-{region}", 2)
    run("enrich_and_route.py", spark)
    for region in set(REGIONS.values()):
        found = [json.loads(value) for value in values(fed_broker.bootstrap, f"orders-{region}")]
        expected = [enriched(i) for i in range(ORDERS) if REGIONS[COUNTRIES[i % 4]] == region]
        with about_rows():
            assert sorted(found, key=itemgetter("cents")) == expected


def test_orders_are_joined_with_their_payments(spark: SparkSession, fed_broker: BrokerProcess) -> None:
    create_topic(fed_broker.bootstrap, "paid", 4)
    run("paid_orders.py", spark)
    found = committed_records(fed_broker.bootstrap, "paid")
    expected = Counter((b"o%d" % i, f"{json.dumps(order_json(i))} paid".encode()) for i in range(ORDERS))
    check_rows(((record.key, record.value) for _, record in found), expected)


def test_totals_of_each_minute_are_brought_up_to_date_in_a_table(
    spark: SparkSession,
    broker: BrokerProcess,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOOTSTRAP", broker.bootstrap)
    monkeypatch.setenv("POSTGRES", postgres.dsn)
    create_topic(broker.bootstrap, "orders", 3, retention_ms="-1")
    postgres.query("CREATE TABLE totals (minute timestamptz PRIMARY KEY, orders bigint, cents bigint)")
    amid_a_minute = 100
    for some in (range(amid_a_minute), range(amid_a_minute, ORDERS)):
        feed_orders(broker.bootstrap, some)
        run("windowed_totals.py", spark)
        found = postgres.query("SELECT extract(epoch FROM minute)::bigint, orders, cents FROM totals")
        check_rows(map(tuple, found), totals_of(range(some.stop)))


def totals_of(numbers: Iterable[int]) -> list[tuple[int, int, int]]:
    """Of each minute its beginning, how many orders, and their sum."""
    minutes: dict[int, list[int]] = {}
    for i in numbers:
        minutes.setdefault((BEGIN_MS // 1000 + i) // 60 * 60, []).append(i)
    return [(start, len(of), sum(of)) for start, of in sorted(minutes.items())]


def test_a_topic_and_a_table_both_have_every_valid_order_once(
    spark: SparkSession,
    fed_broker: BrokerProcess,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POSTGRES", postgres.dsn)
    create_topic(fed_broker.bootstrap, "valid", 4)
    postgres.query("CREATE TABLE orders (id text PRIMARY KEY, country text, cents int)")
    run("topic_and_table.py", spark)
    valid = [order_json(i) for i in range(1, ORDERS)]
    in_topic = values(fed_broker.bootstrap, "valid")
    check_rows(in_topic, [json.dumps(each, separators=(",", ":")).encode() for each in valid])
    in_table = postgres.query("SELECT id, country, cents FROM orders")
    check_rows(map(tuple, in_table), (tuple(each.values()) for each in valid))
