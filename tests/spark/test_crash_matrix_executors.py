"""Executors in other processes: failing tasks, dying executors, lost shuffle files, speculation."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from broker_process import BrokerProcess
from crash_cases import Content, feed
from crash_cases import expected as expected_with_state
from kafka_process import KafkaProcess
from spark_cases import (
    HERE,
    LOCAL_CLUSTER,
    Row,
    StartDriver,
    committed_records,
    create_topic,
    produce,
    written_records,
)
from standalone_cluster import StandaloneCluster

from semel.testing.postgres_server import PostgresServer

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
from mariadb_server import MariaDBServer, mariadb, mariadb_server  # noqa: F401
from postgres_server import postgres, postgres_cluster  # noqa: F401

pytestmark = pytest.mark.timeout(900)

UNLUCKY: Final = HERE / "pipelines" / "unlucky.py"
INPUT: Final = "unlucky_orders"
ROWS: Final = 240
# What goes wrong: `pipelines/unlucky.py` fails if it does not come to pass.
ALL: Final = ("first_row", "last_row", "shuffle", "executor")
FEW: Final = ("last_row", "executor")
IN_CODE: Final = ("first_row", "last_row")
# In RocksDB, in the first and in the second format. Each query meets each misfortune, here or there.
WITH_STATE: Final = (
    "last_row-windows",
    "last_row-windows2",
    "shuffle-windows2",
    "shuffle-join",
    "executor-windows",
    "executor-join",
)
WITH_STATE_ON_KAFKA: Final = ("last_row-join", "shuffle-windows", "executor-windows2")
# In these, a task is struck that has rows in the target.
WITH_ROWS: Final = ("last_row", "shuffle", "executor")
TOPICS: Final = ("topic", "keyed", "kafka")
STRUCK: Final = re.compile(r"^([\w-]+): (\d+) in vain, struck with (\d+) rows$", re.MULTILINE)


def named(target: str, misfortunes: Sequence[str]) -> list[str]:
    return [f"{target}-{misfortune}" for misfortune in misfortunes]


def place_of(name: str) -> str:
    return f"out_{name}".replace("-", "_")


def expected(name: str) -> Counter[Content]:
    target, _, *state = name.split("-")
    if state:
        return expected_with_state(state[0])
    return Counter((None if target == "topic" else b"k%d" % i, b"v%d" % i) for i in range(ROWS))


def suffer(
    start_driver: StartDriver,
    bootstrap: str,
    directory: Path,
    names: Sequence[str],
    master: str = LOCAL_CLUSTER,
    **environment: str,
) -> dict[str, int]:
    """One after the other, in one program: of each, how many rows of the task that was struck were there."""
    create_topic(bootstrap, INPUT, 4)
    produce(bootstrap, INPUT, [Row(b"v%d" % i, b"k%d" % i, partition=i % 4) for i in range(ROWS)])
    feed(bootstrap)
    for name in names:
        if name.startswith(TOPICS):
            server = environment["TEST_KAFKA"] if name.startswith("kafka") else bootstrap
            create_topic(server, place_of(name), 4)
    driver = start_driver(
        UNLUCKY, bootstrap, directory / "places", *names, master=master, environment=environment
    )
    struck = STRUCK.findall(driver.succeed(timeout_s=800))
    assert [name for name, _, _ in struck] == list(names)
    for name, in_vain, rows in struck:
        check_in_vain(name, int(in_vain))
        assert int(rows) > 0 or name.split("-")[1] not in WITH_ROWS, f"{name}: nothing could be doubled"
    return {name: int(rows) for name, _, rows in struck}


def check_in_vain(name: str, in_vain: int) -> None:
    """A second attempt at a task spoils its epoch, which is run again; where rows are staged it does not."""
    if name.startswith("staged"):
        assert in_vain == 0, f"{name}: a task that is tried again stages anew"
    else:
        assert in_vain > 0, f"{name} did no harm"


def check_topic(bootstrap: str, name: str, rows: int) -> None:
    """So many rows of a task that was struck are in the log, and are not committed."""
    found = Counter((record.key, record.value) for _, record in committed_records(bootstrap, place_of(name)))
    assert found == expected(name), name
    assert len(written_records(bootstrap, place_of(name))) >= found.total() + rows, name


def create_table(server: PostgresServer | MariaDBServer, name: str) -> None:
    kind = "bytea" if isinstance(server, PostgresServer) else "blob"
    server.query(f"CREATE TABLE {place_of(name)} (value {kind})")


def check_table(server: PostgresServer | MariaDBServer, name: str) -> None:
    rows = server.query(f"SELECT value FROM {place_of(name)}")
    assert Counter(value for (value,) in rows) == Counter(value for _, value in expected(name).elements())


def test_whatever_happens_to_tasks_and_executors_every_row_arrives_once(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    topics = named("keyed", ALL) + named("topic", IN_CODE)
    tables = named("table", ALL) + named("staged", FEW)
    for name in tables:
        create_table(postgres, name)
    there = suffer(start_driver, broker.bootstrap, tmp_path, topics + tables, TEST_POSTGRES=postgres.dsn)
    for name in topics:
        check_topic(broker.bootstrap, name, there[name])
    for name in tables:
        check_table(postgres, name)


def test_whatever_happens_to_tasks_and_executors_state_goes_with_the_rows(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    names = named("keyed", WITH_STATE)
    there = suffer(start_driver, broker.bootstrap, tmp_path, names)
    for name in names:
        check_topic(broker.bootstrap, name, there[name])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    started = StandaloneCluster(tmp_path / "cluster").start()
    try:
        yield started
    finally:
        started.kill()
        print(f"--- log of the cluster ---\n{started.log[-6000:]}")


def test_where_spark_runs_a_copy_of_a_slow_task_every_row_arrives_once(
    broker: BrokerProcess,
    kafka_broker: KafkaProcess,
    cluster: StandaloneCluster,
    start_driver: StartDriver,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
    mariadb: MariaDBServer,  # noqa: F811
) -> None:
    """It takes longer than its copy waits for it, so that the copy ends first."""
    topics = {"topic": broker, "keyed": broker, "kafka": kafka_broker}
    tables = {"table": postgres, "staged": postgres, "mysql": mariadb}
    for target, server in tables.items():
        create_table(server, f"{target}-speculation")
    servers = {
        "TEST_KAFKA": kafka_broker.bootstrap,
        "TEST_POSTGRES": postgres.dsn,
        "TEST_MYSQL": mariadb.url(),
    }
    names = [f"{target}-speculation" for target in (*topics, *tables)]
    suffer(start_driver, broker.bootstrap, tmp_path, names, cluster.url, **servers)
    for target, process in topics.items():
        check_topic(process.bootstrap, f"{target}-speculation", 0)
    for target, server in tables.items():
        check_table(server, f"{target}-speculation")


def test_whatever_happens_every_row_arrives_once_on_apache_kafka(
    kafka_broker: KafkaProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    names = named("keyed", (*ALL, *WITH_STATE_ON_KAFKA)) + named("topic", IN_CODE)
    there = suffer(start_driver, kafka_broker.bootstrap, tmp_path, names)
    for name in names:
        check_topic(kafka_broker.bootstrap, name, there[name])


def test_whatever_happens_every_row_arrives_once_in_mariadb(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    mariadb: MariaDBServer,  # noqa: F811
) -> None:
    names = named("mysql", ALL)
    for name in names:
        create_table(mariadb, name)
    suffer(start_driver, broker.bootstrap, tmp_path, names, TEST_MYSQL=mariadb.url())
    for name in names:
        check_table(mariadb, name)
