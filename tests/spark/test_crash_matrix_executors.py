"""Executors in other processes: failing tasks, dying executors, lost shuffle files, speculation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from broker_process import BrokerProcess
from crash_cases import Content, feed
from crash_cases import expected as expected_with_state
from kafka_process import KafkaProcess
from mariadb_server import MariaDBServer
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

from row_checks import check_rows
from semel.testing.postgres_server import PostgresServer

pytestmark = pytest.mark.timeout(900)

Server: TypeAlias = BrokerProcess | KafkaProcess | PostgresServer | MariaDBServer

UNLUCKY: Final = HERE / "pipelines" / "unlucky.py"
INPUT: Final = "unlucky_orders"
ROWS: Final = 240
# The targets of `pipelines/unlucky.py`, and the fixtures that they are in; the others are where the input is.
SERVERS: Final = {
    "kafka": "own_kafka",
    "table": "postgres",
    "staged": "postgres",
    "mysql": "mariadb",
    "mysql_staged": "mariadb",
}
TARGETS: Final = ("keyed", "topic", *SERVERS)
# What goes wrong: the program fails if it does not come to pass.
ALL: Final = ("first_row", "last_row", "shuffle", "executor")
IN_CODE: Final = ("first_row", "last_row")
# What keeps state: in RocksDB, in the first and in the second format, and a join of two streams.
QUERIES: Final = ("windows", "windows2", "join")
# In these, a task is struck that has rows in the target.
WITH_ROWS: Final = ("last_row", "shuffle", "executor", "speculation", "patience")
# In these nothing is spoiled, whatever the target.
HARMLESS: Final = ("patience",)
STRUCK: Final = re.compile(r"^([\w-]+): (\d+) in vain, struck with (\d+) rows$", re.MULTILINE)


def named(target: str, misfortunes: Iterable[str]) -> list[str]:
    return [f"{target}-{misfortune}" for misfortune in misfortunes]


def everything(target: str, misfortunes: Iterable[str]) -> list[str]:
    """Each misfortune without state, and with each query that keeps some."""
    return named(
        target, [f"{each}{query}" for each in misfortunes for query in ("", *(f"-{q}" for q in QUERIES))]
    )


def place_of(name: str) -> str:
    return f"out_{name}".replace("-", "_")


def expected(name: str) -> Counter[Content]:
    target, _, *state = name.split("-")
    plain = Counter((b"k%d" % i, b"v%d" % i) for i in range(ROWS))
    rows = expected_with_state(state[0]) if state else plain
    return Counter((None, value) for _, value in rows.elements()) if target == "topic" else rows


def suffer(
    request: pytest.FixtureRequest,
    start_driver: StartDriver,
    directory: Path,
    names: Sequence[str],
    *,
    home: str = "broker",
    master: str = LOCAL_CLUSTER,
) -> None:
    """One after the other, in one program; then each target has what it is to have, and once."""
    bootstrap = request.getfixturevalue(home).bootstrap
    create_topic(bootstrap, INPUT, 4)
    produce(bootstrap, INPUT, [Row(b"v%d" % i, b"k%d" % i, partition=i % 4) for i in range(ROWS)])
    feed(bootstrap)
    servers = {name: request.getfixturevalue(SERVERS.get(name.split("-")[0], home)) for name in names}
    for name, server in servers.items():
        create_place(server, name)
    driver = start_driver(
        UNLUCKY,
        bootstrap,
        directory / "places",
        *names,
        master=master,
        environment=addresses_of(servers.values()),
    )
    driver.wait(timeout_s=800)
    struck = STRUCK.findall(driver.log)
    # Rows first, everyone's: what comes after may be tried once more, and would hide that they differ.
    for name, _, _ in struck:
        check_place(servers[name], name)
    driver.succeed()
    assert [name for name, _, _ in struck] == list(names)
    for name, in_vain, rows in struck:
        check_in_vain(name, int(in_vain))
        check_struck(servers[name], name, int(rows))


def create_place(server: Server, name: str) -> None:
    if isinstance(server, PostgresServer | MariaDBServer):
        kind = "bytea" if isinstance(server, PostgresServer) else "blob"
        server.query(f"CREATE TABLE {place_of(name)} (value {kind})")
    else:
        create_topic(server.bootstrap, place_of(name), 4)


def addresses_of(servers: Iterable[Server]) -> dict[str, str]:
    """As the program is told."""
    addresses = {}
    for server in servers:
        if isinstance(server, PostgresServer):
            addresses["TEST_POSTGRES"] = server.dsn
        elif isinstance(server, MariaDBServer):
            addresses["TEST_MYSQL"] = server.url()
        elif isinstance(server, KafkaProcess):
            addresses["TEST_KAFKA"] = server.bootstrap
    return addresses


def check_in_vain(name: str, in_vain: int) -> None:
    """A second attempt at a task spoils its epoch, which is run again; where rows are staged it does not.

    So both writers of a task whose shuffle files are lost have staged their rows. Unless Spark gives the
    whole job up: rows that come from a shuffle it does not make anew in part.
    """
    target, misfortune, *state = name.split("-")
    if misfortune in HARMLESS:
        assert in_vain == 0, f"{name}: the copy did not wait until its original was done"
    elif "staged" not in target:
        assert in_vain > 0, f"{name} did no harm"
    elif not state or misfortune in IN_CODE:
        assert in_vain == 0, f"{name}: a task that is tried again stages anew"


def check_struck(server: Server, name: str, rows: int) -> None:
    """So many rows of a task that was struck were in the target; in a topic's log they are, not committed."""
    misfortune = name.split("-")[1]
    assert rows > 0 or misfortune not in WITH_ROWS, f"{name}: nothing could be doubled"
    if isinstance(server, BrokerProcess | KafkaProcess) and misfortune not in HARMLESS:
        written = len(written_records(server.bootstrap, place_of(name)))
        assert written >= expected(name).total() + rows, name


def check_place(server: Server, name: str) -> None:
    """By content."""
    wanted = expected(name)
    if isinstance(server, PostgresServer | MariaDBServer):
        found = server.query(f"SELECT value FROM {place_of(name)}")
        check_rows((value for (value,) in found), (value for _, value in wanted.elements()), name)
        return
    committed = committed_records(server.bootstrap, place_of(name))
    check_rows(((record.key, record.value) for _, record in committed), wanted, name)


# Each query with state meets each misfortune, here or there, and each target has such a query.


def test_whatever_happens_to_tasks_and_executors_every_row_arrives_once(
    start_driver: StartDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = named("keyed", ALL) + named("topic", ALL)
    names += named("table", (*ALL, "executor-windows", "last_row-windows2", "shuffle-join"))
    names += named("staged", ("last_row", "shuffle", "executor", "last_row-windows2", "shuffle-windows"))
    suffer(request, start_driver, tmp_path, names)


def test_whatever_happens_to_tasks_and_executors_state_goes_with_the_rows(
    start_driver: StartDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    misfortunes = ("first_row-join", "last_row-windows", "last_row-windows2", "shuffle-windows2")
    misfortunes += ("shuffle-join", "executor-windows", "executor-join")
    suffer(request, start_driver, tmp_path, named("keyed", misfortunes))


def test_whatever_happens_every_row_arrives_once_on_apache_kafka(
    start_driver: StartDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    misfortunes = (*ALL, "last_row-join", "shuffle-windows", "executor-windows2")
    names = named("keyed", misfortunes) + named("topic", ALL)
    suffer(request, start_driver, tmp_path, names, home="own_kafka")


def test_whatever_happens_every_row_arrives_once_in_mariadb(
    start_driver: StartDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = named("mysql", (*ALL, "last_row-join", "shuffle-windows2", "executor-windows"))
    names += named("mysql_staged", ("last_row", "executor", "last_row-windows"))
    suffer(request, start_driver, tmp_path, names)


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_every_query_meets_every_misfortune_into_every_target(
    start_driver: StartDriver, tmp_path: Path, request: pytest.FixtureRequest, target: str
) -> None:
    suffer(request, start_driver, tmp_path, everything(target, ALL))


# Copies of slow tasks


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path / "cluster") as started:
        yield started


@pytest.mark.parametrize(
    "names",
    [
        [
            *(f"{target}-speculation" for target in TARGETS),
            "keyed-speculation-windows2",
            "kafka-speculation-windows",
            "table-speculation-join",
            "keyed-patience",
            "table-patience",
        ],
        *(
            pytest.param(named(target, (f"speculation-{query}" for query in QUERIES)), marks=pytest.mark.soak)
            for target in TARGETS
        ),
    ],
    ids=["most", *TARGETS],
)
def test_where_spark_runs_a_copy_of_a_slow_task_every_row_arrives_once(
    cluster: StandaloneCluster,
    start_driver: StartDriver,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    names: Sequence[str],
) -> None:
    """It takes longer than its copy waits for it, so that the copy ends first.

    With `patience` it does not: it goes on when its copy has read all rows, and is done before the copy is.
    """
    suffer(request, start_driver, tmp_path, names, master=cluster.url)
