"""Faults that have no place in the crash matrix: a batch that takes too long for its transaction, a driver
that dies between the commits of two sinks, a JVM that dies under a Python that lives on.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import pytest
from broker_process import BrokerProcess
from crash_cases import check, feed
from open_epochs import Hold, await_true, is_open_in_postgres, is_open_on_broker
from pipeline_cases import ROWS, Pipeline
from spark_cases import Row, StartDriver, committed_records, create_topic, produce
from test_crash_matrix import Chain

from row_checks import check_rows
from semel.sinks.settings import SinkSettings
from semel.testing.postgres_server import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Longer than any batch takes here that is not held, on a machine that is busy.
TRANSACTION_TIMEOUT_S: Final = 5.0
WAIT_S: Final = 60.0


# A batch that takes longer than its transaction may


class LateCommit:
    """A hook that keeps the commit of a batch waiting, the first time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.is_held = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, epoch: int) -> None:
        if epoch == self._batch and not self.is_held.is_set():
            self.is_held.set()
            assert self.may_go.wait(WAIT_S), "the commit was not let go"


@pytest.mark.parametrize("kind", ["shared_broker", "kafka_broker"])
def test_a_batch_that_takes_longer_than_its_transaction_may_is_run_again(
    spark: SparkSession, topic: str, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """The user's code is late with the first batch, and the commit of the second: each only once."""
    pipeline = Pipeline(spark, request.getfixturevalue(kind).bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    hold, late = Hold(tmp_path, b"v0"), LateCommit(1)
    is_open = partial(is_open_on_broker, pipeline.bootstrap, topic, pipeline.target)
    settings = SinkSettings(before_commit=(late,))
    sink = pipeline.sink(transaction_timeout=TRANSACTION_TIMEOUT_S, settings=settings)
    query = pipeline.start(sink, hold.rows(pipeline.read(ROWS // 2)))

    hold.await_open(is_open)
    await_true(lambda: not is_open(), "the broker has not ended the transaction of the first batch")
    hold.let_go()
    assert late.is_held.wait(WAIT_S), "the second batch did not come to its commit"
    assert is_open()
    await_true(lambda: not is_open(), "the broker has not ended the transaction of the second batch")
    late.may_go.set()

    query.awaitTermination()
    pipeline.check(ROWS)
    assert (query.attempts - query.batches, sink.metrics.aborts) == (2, 2)


# A driver that dies between the commits of two sinks


def test_a_driver_that_dies_between_two_commits_leaves_each_sink_to_go_on_from_its_own(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path, postgres: PostgresServer
) -> None:
    """After the topic's commit and before the table is written; then with the table's all but committed."""
    feed(broker.bootstrap)
    create_topic(broker.bootstrap, "both-out", 4)
    postgres.query("CREATE TABLE both_out (id varchar(40), content varchar(100))")
    chain = Chain(start_driver, broker.bootstrap, tmp_path, ["both"], TEST_POSTGRES=postgres.dsn)
    chain.live_through([{"both": "after_end"}, {"both_table": "before_end"}])
    for died, went_on in zip(chain.logs, chain.logs[1:], strict=False):
        check_went_on(died, went_on)
    found = committed_records(broker.bootstrap, "both-out")
    check("both", ((record.key, record.value) for _, record in found))
    rows = postgres.query("SELECT id, content FROM both_out")
    check("both", ((str(key).encode(), str(value).encode()) for key, value in rows))


def check_went_on(died: str, went_on: str) -> None:
    """The next life skips the batch in the topic, and writes it to the table."""
    (batch,) = re.findall(r"^both\w* at \w+ of batch (\d+) ", died, re.MULTILINE)
    assert f"both skips batch {batch}\n" in went_on, went_on
    assert not re.search(rf"^both wrote batch {batch} ", went_on, re.MULTILINE), went_on
    assert re.search(rf"^both_table wrote batch {batch} ", went_on, re.MULTILINE), went_on


# A JVM that dies under a Python that lives on

ORPHANED: Final = """
import sys
from pathlib import Path
from pipelines.copied import SLOTS, start
from spark_cases import driver_session

bootstrap, checkpoints = sys.argv[1:]
spark = driver_session(SLOTS)
queries = [start(spark, bootstrap, Path(checkpoints), target) for target in ("semel", "postgres")]
for query in queries:
    try:
        query.awaitTermination()
    except Exception as error:
        print(f"{query.name} ended by {type(error).__name__}", flush=True)
print("over", flush=True)
sys.exit(1)
"""
# To notice, to abort two epochs, and to end.
END_TIMEOUT_S: Final = 30.0


def test_a_program_whose_jvm_is_killed_ends_and_leaves_nothing_open(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path, postgres: PostgresServer
) -> None:
    for topic in ("orders", "copied"):
        create_topic(broker.bootstrap, topic, 3)
    produce(broker.bootstrap, "orders", [Row(b"v%d" % i, b"k%d" % i) for i in range(ROWS)])
    postgres.query("CREATE TABLE output (v bytea)")
    is_open = partial(is_open_on_broker, broker.bootstrap, "semel", "copied")
    is_open_table = partial(is_open_in_postgres, postgres, "output")
    arguments = (ORPHANED, broker.bootstrap, tmp_path / "place" / "checkpoints")
    servers = {"TEST_POSTGRES": postgres.dsn}
    (tmp_path / "place").mkdir()

    driver = start_driver(*arguments, environment={**servers, "TEST_HOLD": f"v{ROWS - 1}"})
    for target in ("semel", "postgres"):
        await_true((tmp_path / "place" / f"held-{target}").exists, f"no row for {target} is held")
    await_true(is_open, "no rows are in the topic")
    await_true(is_open_table, "no rows are in the table")
    jvm = the_jvm(driver.children("SparkSubmit"))
    jvm.kill()
    killed = time.monotonic()
    assert driver.wait(END_TIMEOUT_S) == 1
    print(f"the program ended {time.monotonic() - killed:.1f} s after its JVM")
    assert re.findall(r"^(\w+) ended by ", driver.log, re.MULTILINE) == ["semel", "postgres"], driver.log
    assert not is_open()
    assert not is_open_table()

    start_driver(*arguments, environment=servers)
    await_each_row_once("the topic", lambda: content(broker))
    await_each_row_once("the table", lambda: table_content(postgres))


def await_each_row_once(place: str, content: Callable[[], Counter[bytes | None]]) -> None:
    await_true(lambda: content().total() >= ROWS, f"{place} does not have all rows")
    check_rows(content(), [b"v%d" % i for i in range(ROWS)], place)


def the_jvm(found: list[psutil.Process]) -> psutil.Process:
    (jvm,) = [process for process in found if process.name() == "java"]
    return jvm


def content(broker: BrokerProcess) -> Counter[bytes | None]:
    return Counter(record.value for _, record in committed_records(broker.bootstrap, "copied"))


def table_content(postgres: PostgresServer) -> Counter[bytes | None]:
    return Counter(bytes(row[0]) for row in postgres.query("SELECT v FROM output"))
