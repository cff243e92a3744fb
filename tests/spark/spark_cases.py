"""What tests of Spark have in common: driver programs as processes that can be killed, topics with content.

A driver program is Python source, or a file. It runs on this Python with `semel` and this directory on its
path, and begins like

    from spark_cases import driver_session
    spark = driver_session()

Its output goes to a file that a test can wait on: print something (flushed) where the test must act.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from semel.client.admin import READ_COMMITTED, READ_UNCOMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import ConfigError
from semel.spark.java import find_java
from semel.spark.session import LOOPBACK, local_session
from semel.wire.records import Headers, Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE: Final = Path(__file__).parent
TESTS: Final = HERE.parent
LOCAL: Final = "local[2]"
LOCAL_CLUSTER: Final = "local-cluster[2,1,1024]"
DRIVER_TIMEOUT_S: Final = 180.0
POLL_S: Final = 0.05

# Small and quick to start: tests run few rows, many times. Spark's warehouse is made where a process runs, so
# that is a directory of the test's own.
TEST_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    # Wherever executors are, they are on this machine.
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
}


def why_no_spark() -> str | None:
    """The reason why Spark cannot run here, if there is one."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "pyspark is not installed (pip install '.[spark]')"
    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return None


def driver_session(
    master: str | None = None, settings: Mapping[str, str] | None = None, jars: Sequence[Path] = ()
) -> SparkSession:
    """A session for tests; in a driver program the master is what the test chose."""
    chosen = master or os.environ.get("TEST_SPARK_MASTER", LOCAL)
    return local_session(
        "tests",
        master=chosen,
        driver_memory="768m",
        settings={**TEST_SETTINGS, **(settings or {})},
        jars=jars,
        log_level="ERROR",
    )


class DriverProcess:
    """A driver program in a process of its own, with its JVM and its workers."""

    def __init__(
        self,
        program: str | Path,
        arguments: Sequence[str],
        log_path: Path,
        *,
        master: str = LOCAL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        command = [sys.executable, "-u", *(["-c", program] if isinstance(program, str) else [str(program)])]
        paths = [str(HERE), str(TESTS / "broker"), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {"PYTHONPATH": os.pathsep.join(paths), "TEST_SPARK_MASTER": master, **(environment or {})}
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **given},
                # A directory of its own: what the program forgets to place is not left in the checkout.
                cwd=log_path.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def children(self, name_contains: str = "") -> list[psutil.Process]:
        """All processes below the driver, or those whose command line has this in it."""
        found = psutil.Process(self.pid).children(recursive=True)
        return [process for process in found if name_contains in _command_line(process)]

    def wait_for(self, text: str, timeout_s: float = DRIVER_TIMEOUT_S, count: int = 1) -> str:
        """Until the output has this text so many times; the output."""
        give_up = time.monotonic() + timeout_s
        while (log := self.log).count(text) < count:
            if not self.is_alive:
                if self.log.count(text) >= count:
                    break
                raise AssertionError(f"the driver ended before it said {text!r}:\n{log[-6000:]}")
            if time.monotonic() > give_up:
                raise AssertionError(f"the driver did not say {text!r} in {timeout_s} s:\n{log[-6000:]}")
            time.sleep(POLL_S)
        return log

    def wait(self, timeout_s: float = DRIVER_TIMEOUT_S) -> int:
        """The exit code, once the program has ended."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end in {timeout_s} s:\n{self.log[-6000:]}") from None

    def succeed(self, timeout_s: float = DRIVER_TIMEOUT_S) -> str:
        """Waits for the end, which must be a good one; the output."""
        code = self.wait(timeout_s)
        assert code == 0, f"the driver ended with {code}:\n{self.log[-6000:]}"
        return self.log

    def kill(self) -> None:
        """kill -9 of the driver, its JVM and all workers, as when a machine dies."""
        if self._process.poll() is not None:
            return
        # Stopped first, so that none of them sees another one die and acts on it.
        self._process.send_signal(signal.SIGSTOP)
        everyone = self.children()
        self._process.kill()
        for process in everyone:
            _kill(process)
        self._process.wait()
        psutil.wait_procs(everyone, timeout=30)


StartDriver = Callable[..., DriverProcess]
"""The fixture `start_driver`: `start_driver(program, *arguments, master=..., environment=...)`."""


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


# Topics


class Row(NamedTuple):
    """A record as a test writes it and finds it again."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def create_topic(bootstrap: str, topic: str, partitions: int = 1, **configs: str) -> None:
    """A topic; configs by Kafka's names with _ for the dots."""
    named = {name.replace("_", "."): value for name, value in configs.items()}
    asyncio.run(_with_admin(bootstrap, lambda admin: _create(admin, topic, partitions, named)))


def alter_topic(bootstrap: str, topic: str, **configs: str) -> None:
    named = {name.replace("_", "."): value for name, value in configs.items()}
    asyncio.run(_with_admin(bootstrap, lambda admin: admin.alter_topic_configs(topic, assign=named)))


def add_partitions(bootstrap: str, topic: str, total: int) -> None:
    asyncio.run(_with_admin(bootstrap, lambda admin: admin.create_partitions(topic, total)))


def delete_records(bootstrap: str, before: Mapping[tuple[str, int], int]) -> None:
    """Everything before these offsets goes."""
    ends = {TopicPartition(*where): offset for where, offset in before.items()}
    asyncio.run(_with_admin(bootstrap, lambda admin: admin.delete_records(ends)))


def produce(bootstrap: str, topic: str, rows: Sequence[Row]) -> None:
    asyncio.run(_produce(bootstrap, topic, rows))


def produce_transaction(
    bootstrap: str, topic: str, rows: Sequence[Row], *, commit: bool = True, transactional_id: str = "feeder"
) -> None:
    """One transaction, committed or aborted."""
    asyncio.run(_produce_transaction(bootstrap, topic, rows, commit, transactional_id))


async def _with_admin(bootstrap: str, act: Callable[[Admin], Awaitable[object]]) -> None:
    async with Cluster(bootstrap) as cluster:
        await act(Admin(cluster))


async def _create(admin: Admin, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
    await admin.create_topic(topic, partitions=partitions, replication_factor=1, configs=configs)


async def _produce(bootstrap: str, topic: str, rows: Sequence[Row]) -> None:
    async with Cluster(bootstrap) as cluster, Producer(cluster) as producer:
        for row in rows:
            await _send(producer, topic, row)


async def _produce_transaction(
    bootstrap: str, topic: str, rows: Sequence[Row], commit: bool, transactional_id: str
) -> None:
    async with Cluster(bootstrap) as cluster, TransactionalProducer(cluster, transactional_id) as producer:
        await producer.begin()
        for row in rows:
            await _send(producer, topic, row)
        await producer.flush()
        await (producer.commit() if commit else producer.abort())


async def _send(producer: Producer | TransactionalProducer, topic: str, row: Row) -> None:
    await producer.send(
        topic,
        row.value,
        key=row.key,
        headers=row.headers,
        partition=row.partition,
        timestamp_ms=row.timestamp_ms,
    )


def committed_records(bootstrap: str, topic: str) -> list[tuple[int, Record]]:
    """Everything that a reader of committed records sees: partition and record, in the order of the log."""
    return asyncio.run(_records(bootstrap, topic, READ_COMMITTED))


def written_records(bootstrap: str, topic: str) -> list[tuple[int, Record]]:
    """The same with what is open or was aborted."""
    return asyncio.run(_records(bootstrap, topic, READ_UNCOMMITTED))


async def _records(bootstrap: str, topic: str, isolation_level: int) -> list[tuple[int, Record]]:
    found: list[tuple[int, Record]] = []
    options = ConsumerOptions(isolation_level=isolation_level)
    async with Cluster(bootstrap) as cluster, Consumer(cluster, options) as consumer:
        partitions = await consumer.partitions_of(topic)
        await consumer.assign(partitions)
        ends = await consumer.end_offsets()
        while any(consumer.position(where) < end for where, end in ends.items()):
            for batch in await consumer.poll(1_000):
                found += [(batch.where.partition, record) for record in batch.records()]
    return sorted(found, key=lambda each: (each[0], each[1].offset))
