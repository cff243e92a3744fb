"""Two drivers of one name at once, in processes of their own, the second on a copy of the checkpoint."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from mariadb_server import MariaDBServer
from spark_cases import HERE, DriverProcess, Row, StartDriver, committed_records, create_topic, produce

from semel.testing.postgres_server import PostgresServer

COPIED: Final = HERE / "pipelines" / "copied.py"
TARGETS: Final = ("semel", "kafka", "postgres", "mariadb")
TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.1


class Targets:
    """The same rows are to be in all of them."""

    def __init__(
        self, broker: BrokerProcess, kafka: KafkaProcess, postgres: PostgresServer, mariadb: MariaDBServer
    ) -> None:
        self._source = broker.bootstrap
        self._topics = {"semel": broker.bootstrap, "kafka": kafka.bootstrap}
        self._tables: dict[str, Callable[[str], list[tuple[Any, ...]]]] = {
            "postgres": postgres.query,
            "mariadb": mariadb.query,
        }
        create_topic(broker.bootstrap, "orders", 3)
        for bootstrap in self._topics.values():
            create_topic(bootstrap, "copied", 4)
        for query, bytes_type in ((postgres.query, "bytea"), (mariadb.query, "varbinary(40)")):
            query(f"CREATE TABLE output (v {bytes_type})")

    def feed(self, start: int, stop: int) -> None:
        produce(self._source, "orders", [Row(b"v%d" % i, b"k%d" % i) for i in range(start, stop)])

    def content(self, target: str) -> Counter[bytes | None]:
        if target in self._topics:
            return Counter(record.value for _, record in committed_records(self._topics[target], "copied"))
        return Counter(bytes(row[0]) for row in self._tables[target]("SELECT v FROM output"))

    def await_rows(self, stop: int, *drivers: DriverProcess) -> None:
        """Until all targets have all rows up to here, each once; sooner if one has what it should not."""
        expected = Counter(b"v%d" % i for i in range(stop))
        for target in TARGETS:
            give_up = time.monotonic() + TIMEOUT_S
            while (found := self.content(target)) != expected:
                assert not found - expected, f"{target} has doubled rows"
                assert all(driver.is_alive for driver in drivers), "a driver has ended"
                assert time.monotonic() < give_up, f"{target} has {found.total()} rows of {stop}"
                time.sleep(POLL_S)

    def check(self, stop: int) -> None:
        for target in TARGETS:
            assert self.content(target) == Counter(b"v%d" % i for i in range(stop)), target


@pytest.fixture
def targets(
    broker: BrokerProcess, kafka_broker: KafkaProcess, postgres: PostgresServer, mariadb: MariaDBServer
) -> Targets:
    return Targets(broker, kafka_broker, postgres, mariadb)


def test_of_two_drivers_on_copies_of_a_checkpoint_the_first_is_fenced_and_the_second_goes_on(
    targets: Targets,
    broker: BrokerProcess,
    kafka_broker: KafkaProcess,
    postgres: PostgresServer,
    mariadb: MariaDBServer,
    start_driver: StartDriver,
    tmp_path: Path,
) -> None:
    """The first is amid the very batch that the second runs, with rows of it in its transaction."""
    servers = {
        "TEST_KAFKA": kafka_broker.bootstrap,
        "TEST_POSTGRES": postgres.dsn,
        "TEST_MYSQL": mariadb.url(),
    }
    targets.feed(0, 60)
    first_place, second_place = tmp_path / "first" / "checkpoints", tmp_path / "second" / "checkpoints"
    first = start_driver(
        COPIED, broker.bootstrap, first_place, *TARGETS, environment={**servers, "TEST_HOLD": "v99"}
    )
    targets.await_rows(60, first)
    targets.feed(60, 100)
    await_files([first_place.parent / f"held-{target}" for target in TARGETS], first)

    shutil.copytree(first_place, second_place)
    second = start_driver(COPIED, broker.bootstrap, second_place, *TARGETS, environment=servers)
    targets.await_rows(100, first, second)
    targets.feed(100, 120)
    targets.await_rows(120, first, second)

    (first_place.parent / "go").touch()
    assert first.wait(TIMEOUT_S) == 0
    fenced = re.findall(rf"^(\w+): FencedOut: .*process {second.pid} on ", first.log, re.MULTILINE)
    assert sorted(fenced) == sorted(TARGETS), first.log
    targets.feed(120, 140)
    targets.await_rows(140, second)
    (second_place.parent / "stop").touch()
    second.succeed(TIMEOUT_S)
    assert sorted(re.findall(r"^(\w+): stopped", second.log, re.MULTILINE)) == sorted(TARGETS), second.log
    targets.check(140)


def await_files(paths: list[Path], driver: DriverProcess) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while missing := [path.name for path in paths if not path.exists()]:
        assert driver.is_alive, "the driver has ended"
        assert time.monotonic() < give_up, f"there is no {missing}"
        time.sleep(POLL_S)
