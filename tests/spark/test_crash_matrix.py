"""The crash matrix: the driver is killed with -9 at every step of an epoch, and the output equals the input.

Each test is a chain of lives of one program (`pipelines/crashing.py`) that runs several pipelines. A life
finishes what the one before left behind, and dies when every pipeline has come to a step of its own; the
steps go round, so that in the end each pipeline has died at each of them. Every other life takes its JVM and
its workers along, as where a machine loses power; those of the others go on until they notice. The first life
dies in batch 0, the last one reads to the end. What is in the targets is then compared with the input, by
content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pytest
from broker_process import BrokerProcess
from crash_cases import ORDERS, Content, check, check_state, feed
from kafka_process import KafkaProcess
from mariadb_server import MariaDBServer
from spark_cases import DriverProcess, StartDriver, committed_records, create_topic
from standalone_cluster import StandaloneCluster

from semel.testing.postgres_server import PostgresServer

# A chain has nine lives, each with a JVM of its own.
pytestmark = pytest.mark.timeout(900)

Query: TypeAlias = Callable[[str], list[tuple[Any, ...]]]

CRASHING: Final = Path(__file__).parent / "pipelines" / "crashing.py"
# Room for three tasks that are held in one pipeline and two in each of two others, and for those of the rest.
MASTER: Final = "local[8]"
# In this order each finds what it needs: a recovery with a transaction that is open, marker and all, and
# a batch that is committed and not in Spark's log.
STEPS: Final = (
    "before_begin",
    "amid_tasks",
    "after_tasks",
    "before_marker",
    "before_end",
    "in_recovery",
    "after_end",
    "in_skip",
)
# They need a step before: a chain does not begin with them.
FOLLOWING: Final = ("in_recovery", "in_skip")
# In these there were rows in the target, or on their way.
WITH_ROWS: Final = ("amid_tasks", "after_tasks", "before_marker", "before_end", "after_end")
# Those of windows are not the second: nothing comes of a window in batch 0, and so nobody is met amid tasks.
INTO_TOPICS: Final = ("windows", "keyed", "unkeyed", "windows2", "recut", "join0")
INTO_KAFKA: Final = ("windows0", "keyed", "unkeyed_recut", "windows2", "recut", "join")
# Both databases and both strategies, with and without state; the others are all that is left. One of them is
# an upsert, and no more: there, a batch that is written twice leaves the same rows.
INTO_TABLES: Final = (
    "pg_windows",
    "my_orders",
    "my_join",
    "pg_recut",
    "pg_staged_recut",
    "my_staged_windows",
    "my_totals",
    "pg_join",
)
INTO_OTHERS: Final = ("my_windows", "pg_orders", "my_recut", "my_staged_recut", "pg_windows2")
INTO_STAGES: Final = (
    "pg_staged_windows",
    "pg_staged_orders",
    "pg_staged_join",
    "my_staged_orders",
    "my_staged_join",
    "my_windows2",
)
INTO_TOTALS: Final = ("pg_totals", "pg_staged_totals", "my_staged_totals")
# With rows in the target, committed, and on their way: where the steps themselves are not the question.
FEW_STEPS: Final = ("before_end", "after_end", "amid_tasks")
ON_A_CLUSTER: Final = ("windows2", "join", "keyed", "pg_staged_windows", "my_staged_orders")
CLUSTER_CORES: Final = 4
BY_SPARK: Final = ("by_spark_keyed", "by_spark_windows")
STATEFUL: Final = ("windows", "totals", "join")
# Of those, the ones whose state is in the store that Spark has by itself, and in RocksDB's first format.
IN_FORMAT_0: Final = ("windows0", "join0")
IN_FORMAT_1: Final = (
    "windows",
    "pg_windows",
    "my_windows",
    "pg_totals",
    "pg_staged_totals",
    "my_staged_totals",
)
# Into how many partitions `recut` shuffles, or into as few as will do. Of three, as there may be a life
# without a batch between that in which one died and that in which it is replayed.
CUTS: Final = ("", "2", "3")
# What a driver says when everyone is where they are to die.
DYING: Final = "dying"
# Spark gives a worker ten seconds to start.
TOO_SLOW: Final = "Python worker failed to connect back"
MAX_EARLY_ENDS: Final = 4


class Met(NamedTuple):
    """Where a pipeline was when the driver died."""

    pipeline: str
    step: str
    batch: int
    rows: int
    tasks: int


MET: Final = re.compile(r"^(\w+) at (\w+) of batch (-?\d+) with (\d+) rows of (\d+) tasks$", re.MULTILINE)
WROTE: Final = re.compile(r"^(\w+) wrote batch (\d+) with \d+ rows of (\d+) tasks$", re.MULTILINE)


def lives_of(pipelines: Sequence[str], steps: Sequence[str] = STEPS) -> list[dict[str, str]]:
    """Who dies where, life for life: everyone at every step, and no two at the same, as far as that goes."""
    starts = cycle(place for place, step in enumerate(steps) if step not in FOLLOWING)
    started = dict(zip(pipelines, starts, strict=False))
    return [
        {
            pipeline: step_of(pipeline, steps[(start + life) % len(steps)])
            for pipeline, start in started.items()
        }
        for life in range(len(steps))
    ]


def step_of(pipeline: str, step: str) -> str:
    """Without state nothing is executed when a batch is skipped: another recovery instead."""
    return "in_recovery" if step == "in_skip" and not has_state(pipeline) else step


def has_state(pipeline: str) -> bool:
    return any(name in pipeline for name in STATEFUL)


def check_states(directory: Path, pipelines: Iterable[str]) -> None:
    for pipeline in filter(has_state, pipelines):
        checkpoint = directory / "lives" / "checkpoints" / pipeline
        check_state(checkpoint, format_of(pipeline))


def format_of(pipeline: str) -> int:
    if pipeline in IN_FORMAT_0:
        return 0
    return 1 if pipeline in IN_FORMAT_1 else 2


class Chain:
    """The lives of one program."""

    def __init__(
        self,
        start_driver: StartDriver,
        bootstrap: str,
        directory: Path,
        pipelines: Sequence[str],
        master: str = MASTER,
        **environment: str,
    ) -> None:
        self._start_driver = start_driver
        self._master = master
        self._arguments = (CRASHING, bootstrap, directory / "lives", *pipelines)
        self._environment = environment
        self.logs: list[str] = []

    def live_through(self, lives: Iterable[dict[str, str]]) -> None:
        """One life for each, the first of which ends in batch 0, then one that reads to the end."""
        for life, deaths in enumerate(lives):
            given = {
                "TEST_DIE": " ".join(":".join(each) for each in deaths.items()),
                "TEST_DIE_IN": "2" if life else "1",
            }
            if life % 2:
                given["TEST_KILLED"] = "1"
            check_met(deaths, met_in(self._live(given, until=DYING)))
            if not life:
                check_met_in_batch_0(deaths, self.logs)
        self._live({"TEST_PER_BATCH": str(10 * ORDERS)}, until="done")

    def _live(self, environment: dict[str, str], until: str) -> str:
        """One life, that ends as it should. On a busy machine Spark may give up early: a crash, too."""
        for _ in range(MAX_EARLY_ENDS):
            cut = CUTS[len(self.logs) % len(CUTS)]
            given = {**self._environment, **environment, "TEST_PARTITIONS": cut}
            driver = self._start_driver(*self._arguments, master=self._master, environment=given)
            if "TEST_KILLED" in given:
                kill_with_all_below(driver)
            driver.wait()
            log = driver.log
            self.logs.append(log)
            if until in log.splitlines():
                return log
            assert TOO_SLOW in log, f"{environment} ended without {until!r}:\n{log[-6000:]}"
        raise AssertionError(f"{MAX_EARLY_ENDS} drivers in a row were too slow")


def kill_with_all_below(driver: DriverProcess) -> None:
    """Once it says that everyone is where they are to die."""
    try:
        driver.wait_for(f"{DYING}\n")
    except AssertionError:
        if driver.is_alive:
            raise
        return  # it has ended early: its log is looked at next
    driver.kill()


def met_in(log: str) -> list[Met]:
    return [
        Met(pipeline, step, int(batch), int(rows), int(tasks))
        for pipeline, step, batch, rows, tasks in MET.findall(log)
    ]


def check_met(deaths: dict[str, str], met: list[Met]) -> None:
    """Everyone died where it was told to, and not with empty hands."""
    assert {each.pipeline: each.step for each in met} == deaths
    for each in met:
        may_be_empty = each.step not in WITH_ROWS or (each.batch == 0 and "windows" in each.pipeline)
        assert each.rows > 0 or may_be_empty, f"nothing could be lost or doubled: {each}"


def check_met_in_batch_0(deaths: dict[str, str], logs: list[str]) -> None:
    """In one log, or in that of a driver that ended early: what it had committed is skipped by the next."""
    assert {each.pipeline for log in logs for each in met_in(log) if each.batch == 0} == set(deaths)


class Databases:
    """Where the tables are that pipelines write to, by how their names begin."""

    def __init__(self, postgres: PostgresServer, mariadb: MariaDBServer) -> None:
        self._queries: dict[str, Query] = {"pg": postgres.query, "my": mariadb.query}
        self.environment = {"TEST_POSTGRES": postgres.dsn, "TEST_MYSQL": mariadb.url()}

    def query_of(self, pipeline: str) -> Query | None:
        """Of the database that its table is in; a pipeline that has none writes to a topic."""
        return self._queries.get(pipeline.partition("_")[0])


@pytest.fixture
def databases(postgres: PostgresServer, mariadb: MariaDBServer) -> Databases:
    return Databases(postgres, mariadb)


def survive(
    start_driver: StartDriver,
    bootstrap: str,
    directory: Path,
    pipelines: Sequence[str],
    master: str = MASTER,
    steps: Sequence[str] = STEPS,
    databases: Databases | None = None,
) -> None:
    feed(bootstrap)
    queries = {pipeline: databases and databases.query_of(pipeline) for pipeline in pipelines}
    for pipeline, query in queries.items():
        create_target(bootstrap, pipeline, query)
    environment = databases.environment if databases else {}
    chain = Chain(start_driver, bootstrap, directory, pipelines, master, **environment)
    chain.live_through(lives_of(pipelines, steps))
    for pipeline, query in queries.items():
        check(pipeline, content_of(bootstrap, pipeline, query))
    check_recut(pipelines, chain.logs)
    check_states(directory, pipelines)


def create_target(bootstrap: str, pipeline: str, query: Query | None) -> None:
    if query is None:
        create_topic(bootstrap, f"{pipeline}-out", 4)
        return
    key = "PRIMARY KEY" if "totals" in pipeline else ""
    query(f"CREATE TABLE {pipeline} (id varchar(40) {key}, content varchar(100))")


def content_of(bootstrap: str, pipeline: str, query: Query | None) -> list[Content]:
    if query is None:
        found = committed_records(bootstrap, f"{pipeline}-out")
        return [(record.key, record.value) for _, record in found]
    rows = query(f"SELECT id, content FROM {pipeline}")
    return [(str(key).encode(), str(value).encode()) for key, value in rows]


def check_recut(pipelines: Iterable[str], logs: list[str]) -> None:
    """Those with a shuffle of their own: a batch that died was cut otherwise when it was replayed."""
    for pipeline in pipelines:
        if "recut" not in pipeline:
            continue
        cuts = cuts_of(pipeline, logs)
        replayed = {batch: tasks for batch, tasks in cuts.items() if len(tasks) > 1}
        print(f"{pipeline}: batches that were replayed, in so many partitions: {replayed}")
        assert replayed
        assert all(len(set(tasks)) > 1 for tasks in replayed.values()), replayed
        assert any(1 in tasks for tasks in cuts.values()), f"adaptive execution has merged nothing: {cuts}"


def cuts_of(pipeline: str, logs: list[str]) -> dict[int, list[int]]:
    """Of each batch that was written: by how many tasks, time after time."""
    cuts: dict[int, list[int]] = {}
    for log in logs:
        for name, batch, tasks in WROTE.findall(log):
            if name == pipeline:
                cuts.setdefault(int(batch), []).append(int(tasks))
    return cuts


# From topics to topics


def test_pipelines_into_topics_survive_a_driver_killed_at_every_step(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    survive(start_driver, broker.bootstrap, tmp_path, INTO_TOPICS)


def test_pipelines_on_apache_kafka_survive_a_driver_killed_at_every_step(
    own_kafka: KafkaProcess,
    start_driver: StartDriver,
    tmp_path: Path,
) -> None:
    survive(start_driver, own_kafka.bootstrap, tmp_path, INTO_KAFKA)


def test_pipelines_on_a_cluster_survive_a_driver_whose_executors_outlive_it(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path, databases: Databases
) -> None:
    """Some of them write to tables."""
    with StandaloneCluster(tmp_path / "cluster", CLUSTER_CORES) as cluster:
        survive(start_driver, broker.bootstrap, tmp_path, ON_A_CLUSTER, cluster.url, FEW_STEPS, databases)


def test_pipelines_from_sparks_own_source_survive_a_driver_that_is_killed(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path, jvm_connector: None
) -> None:
    survive(start_driver, broker.bootstrap, tmp_path, BY_SPARK, steps=FEW_STEPS)


# From topics to tables


@pytest.mark.parametrize(
    "pipelines",
    [
        INTO_TABLES,
        pytest.param(INTO_OTHERS, marks=pytest.mark.soak),
        pytest.param(INTO_STAGES, marks=pytest.mark.soak),
        pytest.param(INTO_TOTALS, marks=pytest.mark.soak),
    ],
    ids=["most", "others", "stages", "totals"],
)
def test_pipelines_into_tables_survive_a_driver_killed_at_every_step(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    databases: Databases,
    pipelines: Sequence[str],
) -> None:
    survive(start_driver, broker.bootstrap, tmp_path, pipelines, databases=databases)
