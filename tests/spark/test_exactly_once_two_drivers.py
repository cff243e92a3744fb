"""Two drivers of one name at once, each a process: on copies of a checkpoint, on one, or on two."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from broker_process import BrokerProcess
from crash_cases import STATES, check_state
from kafka_process import KafkaProcess
from mariadb_server import MariaDBServer
from spark_cases import HERE, DriverProcess, Row, StartDriver, committed_records, create_topic, produce

from row_checks import check_rows
from semel.testing.postgres_server import PostgresServer

COPIED: Final = HERE / "pipelines" / "copied.py"
TARGETS: Final = ("semel", "kafka", "postgres", "mariadb")
TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.1


class Targets:
    """The same rows are to be in all of them."""

    def __init__(self, source: str, contents: Mapping[str, Callable[[], Counter[bytes | None]]]) -> None:
        self._source = source
        self._contents = contents
        create_topic(source, "orders", 3)

    def feed(self, start: int, stop: int) -> None:
        produce(self._source, "orders", [Row(b"v%d" % i, b"k%d" % i) for i in range(start, stop)])

    def await_rows(self, stop: int, *drivers: DriverProcess) -> None:
        """Until all targets have all rows up to here, each once; sooner if one has what it should not."""
        expected = Counter(b"v%d" % i for i in range(stop))
        for target, content in self._contents.items():
            give_up = time.monotonic() + TIMEOUT_S
            while (found := content()) != expected:
                check_rows(found, found & expected, target)
                assert all(driver.is_alive for driver in drivers), "a driver has ended"
                assert time.monotonic() < give_up, f"{target} has {found.total()} rows of {stop}"
                time.sleep(POLL_S)

    def check(self, stop: int) -> None:
        for target, content in self._contents.items():
            check_rows(content(), [b"v%d" % i for i in range(stop)], target)


def output_topic(bootstrap: str, topic: str = "copied") -> Callable[[], Counter[bytes | None]]:
    """Made anew; what is in it."""
    create_topic(bootstrap, topic, 4)
    return lambda: Counter(record.value for _, record in committed_records(bootstrap, topic))


def output_table(
    query: Callable[[str], list[tuple[Any, ...]]], bytes_type: str
) -> Callable[[], Counter[bytes | None]]:
    """Made anew; what is in it."""
    query(f"CREATE TABLE output (v {bytes_type})")
    return lambda: Counter(bytes(row[0]) for row in query("SELECT v FROM output"))


@pytest.fixture
def targets(
    broker: BrokerProcess, own_kafka: KafkaProcess, postgres: PostgresServer, mariadb: MariaDBServer
) -> Targets:
    """One of every kind."""
    contents = {
        "semel": output_topic(broker.bootstrap),
        "kafka": output_topic(own_kafka.bootstrap),
        "postgres": output_table(postgres.query, "bytea"),
        "mariadb": output_table(mariadb.query, "varbinary(40)"),
    }
    return Targets(broker.bootstrap, contents)


@pytest.fixture
def servers(own_kafka: KafkaProcess, postgres: PostgresServer, mariadb: MariaDBServer) -> dict[str, str]:
    """Where the targets are, as the program is told."""
    return {
        "TEST_KAFKA": own_kafka.bootstrap,
        "TEST_POSTGRES": postgres.dsn,
        "TEST_MYSQL": mariadb.url(),
    }


@pytest.fixture
def semel_alone(broker: BrokerProcess) -> Targets:
    return Targets(broker.bootstrap, {"semel": output_topic(broker.bootstrap)})


def test_of_two_drivers_on_copies_of_a_checkpoint_the_first_is_fenced_and_the_second_goes_on(
    targets: Targets,
    servers: dict[str, str],
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
) -> None:
    """The first is amid the very batch that the second runs, with rows of it in its transaction."""
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


def test_a_driver_with_a_checkpoint_of_its_own_is_refused_and_does_not_disturb_the_one_that_has_the_name(
    targets: Targets,
    servers: dict[str, str],
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
) -> None:
    """Another pipeline was given a name that is taken. The first is amid a batch, which is written once."""
    targets.feed(0, 60)
    place, other_place = tmp_path / "first" / "checkpoints", tmp_path / "second" / "checkpoints"
    first = start_driver(
        COPIED, broker.bootstrap, place, *TARGETS, environment={**servers, "TEST_HOLD": "v99"}
    )
    targets.await_rows(60, first)
    targets.feed(60, 100)
    await_files([place.parent / f"held-{target}" for target in TARGETS], first)

    second = start_driver(COPIED, broker.bootstrap, other_place, *TARGETS, environment=servers)
    assert second.wait(TIMEOUT_S) == 0
    refused = re.findall(r"^(\w+): MarkerMismatch: .* is of another query ", second.log, re.MULTILINE)
    assert sorted(refused) == sorted(TARGETS), second.log

    (place.parent / "go").touch()
    targets.await_rows(100, first)
    targets.feed(100, 120)
    targets.await_rows(120, first)
    (place.parent / "stop").touch()
    first.succeed(TIMEOUT_S)
    stopped = re.findall(r"^(\w+): stopped, and wrote 0 batches in vain$", first.log, re.MULTILINE)
    assert sorted(stopped) == sorted(TARGETS), first.log
    targets.check(120)


def test_of_two_drivers_on_one_checkpoint_the_one_amid_a_batch_is_fenced_and_the_other_goes_on(
    semel_alone: Targets, broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    place = tmp_path / "place" / "checkpoints"
    given = (COPIED, broker.bootstrap, place, "semel")
    semel_alone.feed(0, 60)
    first = start_driver(*given, environment={"TEST_HOLD": "v99"})
    semel_alone.await_rows(60, first)
    semel_alone.feed(60, 100)
    await_files([place.parent / "held-semel"], first)

    second = start_driver(*given)
    semel_alone.await_rows(100, first, second)
    (place.parent / "go").touch()
    assert first.wait(TIMEOUT_S) == 0
    assert re.search(rf"^semel: FencedOut: .*process {second.pid} on ", first.log, re.MULTILINE), first.log
    semel_alone.feed(100, 120)
    semel_alone.await_rows(120, second)
    (place.parent / "stop").touch()
    second.succeed(TIMEOUT_S)
    semel_alone.check(120)


@pytest.fixture
def stateful(broker: BrokerProcess) -> Targets:
    """One for each format of state."""
    contents = {state: output_topic(broker.bootstrap, f"copied-{state}") for state in STATES}
    return Targets(broker.bootstrap, contents)


@pytest.mark.parametrize(
    "is_copied", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["one", "copies"]
)
def test_of_two_drivers_with_state_the_first_is_fenced_and_what_the_second_remembers_is_whole(
    stateful: Targets, broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path, is_copied: bool
) -> None:
    """Both write the state of one batch, the first when the second has done so, which is on copies of the
    checkpoints, or on the same ones. A third reads it from there: what it has forgotten is doubled.
    """
    stateful.feed(0, 60)
    place = tmp_path / "first" / "checkpoints"
    first = start_driver(COPIED, broker.bootstrap, place, *STATES, environment={"TEST_HOLD": "v99"})
    stateful.await_rows(60, first)
    stateful.feed(60, 100)
    await_files([place.parent / f"held-{state}" for state in STATES], first)

    next_place = copy_of(place) if is_copied else place
    second = start_driver(COPIED, broker.bootstrap, next_place, *STATES)
    stateful.await_rows(100, first, second)
    (place.parent / "go").touch()
    assert first.wait(TIMEOUT_S) == 0
    fenced = re.findall(rf"^(\w+): FencedOut: .*process {second.pid} on ", first.log, re.MULTILINE)
    assert sorted(fenced) == sorted(STATES), first.log
    second.kill()

    third = start_driver(COPIED, broker.bootstrap, next_place, *STATES)
    stateful.feed(0, 120)
    stateful.await_rows(120, third)
    (next_place.parent / "stop").touch()
    third.succeed(TIMEOUT_S)
    stateful.check(120)
    for state, state_format in STATES.items():
        check_state(next_place / state, state_format)


def copy_of(checkpoints: Path) -> Path:
    """Of checkpoints that are in use: a file that is being written has another name until it is whole."""
    copy = checkpoints.parents[1] / "copy" / checkpoints.name
    return Path(shutil.copytree(checkpoints, copy, ignore=shutil.ignore_patterns("*.tmp", "*.tmp.crc")))


# Spark has two ways to say it: the batch was there, or came to be there while it was written.
WHY: Final = re.compile(
    r"FencedOut: .* process \d+|Multiple streaming jobs detected|Multiple streaming queries are concurrently"
)
# It says when it has nothing left to do, and ends with what ends its pipeline.
IDLING: Final = """
import sys
from pathlib import Path
from pipelines.copied import start
from spark_cases import driver_session

bootstrap, checkpoints = sys.argv[1:]
query = start(driver_session(), bootstrap, Path(checkpoints), "semel")
query.processAllAvailable()
print("idle", flush=True)
query.awaitTermination()
"""


def test_of_two_drivers_that_plan_a_batch_in_one_checkpoint_spark_refuses_one_and_the_next_start_goes_on(
    semel_alone: Targets, broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    """The older one has lost its sink. If it plans the batch all the same, the newer one is refused."""
    given = (IDLING, broker.bootstrap, tmp_path / "place" / "checkpoints")
    semel_alone.feed(0, 60)
    first = start_driver(*given)
    first.wait_for("idle")
    second = start_driver(*given)
    second.wait_for("idle")
    semel_alone.feed(60, 80)
    ends = [why_it_ended(first)]
    if ends == [f"FencedOut: sink 'semel' was fenced by process {second.pid}"]:
        ends.append(why_it_ended(second))
    assert ends[-1].startswith("Multiple streaming ")

    second.kill()
    semel_alone.feed(80, 100)
    start_driver(*given).wait_for("idle")
    semel_alone.check(100)


def why_it_ended(driver: DriverProcess) -> str:
    assert driver.wait(TIMEOUT_S) == 1, "its program was not told"
    return WHY.findall(driver.log)[-1]


def await_files(paths: list[Path], driver: DriverProcess) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while missing := [path.name for path in paths if not path.exists()]:
        assert driver.is_alive, "the driver has ended"
        assert time.monotonic() < give_up, f"there is no {missing}"
        time.sleep(POLL_S)
