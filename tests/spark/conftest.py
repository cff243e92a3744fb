"""Fixtures for tests on a real Spark: a session that tests share, brokers, drivers that can be killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "broker"), str(HERE.parent / "sinks")]

from broker_fixtures import broker, kafka_broker, own_kafka, start_broker, topic  # noqa: E402, F401
from broker_process import BrokerProcess  # noqa: E402
from connector_jars import connector_jars, why_no_connector  # noqa: E402
from mariadb_server import mariadb, mariadb_server  # noqa: E402, F401
from postgres_server import postgres, postgres_cluster  # noqa: E402, F401
from spark_cases import DriverProcess, StartDriver, driver_session, why_no_spark  # noqa: E402

if TYPE_CHECKING:
    from pipeline_cases import Pipeline
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def _spark_is_there() -> None:
    missing = why_no_spark()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session, in this process, for all tests that do not kill it; with Spark's own connector, if any."""
    # This process runs in the checkout, where no trace of it is to be left.
    elsewhere = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    session = driver_session(settings=elsewhere, jars=connector_jars())
    yield session
    session.stop()


@pytest.fixture
def jvm_connector() -> None:
    """For tests of Spark's own connector, which are skipped where its jars cannot be had."""
    missing = why_no_connector()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture
def start_driver(tmp_path: Path) -> Iterator[StartDriver]:
    """Start driver programs; what still runs is killed, and all output shown, when the test is over."""
    started: list[DriverProcess] = []

    def start(program: str | Path, *arguments: object, **options: object) -> DriverProcess:
        log_path = tmp_path / f"driver-{len(started)}.log"
        driver = DriverProcess(program, [str(each) for each in arguments], log_path, **options)  # type: ignore[arg-type]
        started.append(driver)
        return driver

    yield start
    for driver in started:
        driver.kill()
        print(f"--- output of {driver.log_path.name} ---\n{driver.log[-20_000:]}")


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One durable broker for all tests that neither kill it nor change its settings."""
    process = BrokerProcess(tmp_path_factory.mktemp("shared") / "broker").start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Pipeline]:
    """Into the target that `target_cases.into` names."""
    from target_cases import make_pipeline

    name = request.getfixturevalue("topic")
    pipeline = make_pipeline(request.param, spark, name, tmp_path, request)
    yield pipeline
    for query in pipeline.spark.streams.active:
        query.stop()
