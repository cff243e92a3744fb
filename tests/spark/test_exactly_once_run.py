"""`semel run`: a pipeline is kept alive, told about, and not started again where that would not help."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
from broker_process import BrokerProcess, free_port
from click.testing import CliRunner
from spark_cases import (
    HERE,
    TEST_SETTINGS,
    Row,
    alter_topic,
    committed_records,
    create_topic,
    produce,
    written_records,
)
from standalone_cluster import StandaloneCluster

from row_checks import check_rows
from semel.cli.root import root
from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.loop_thread import LoopThread
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import TransactionOptions
from semel.client.transaction_admin import TransactionAdmin
from semel.client.transactional_producer import TransactionalProducer
from semel.sinks.kafka import KafkaSink
from semel.sinks.kafka.markers import transactional_id_of

SUPERVISED: Final = HERE / "pipelines" / "supervised.py"
PAID_ORDERS: Final = HERE.parents[1] / "examples" / "pipelines" / "paid_orders.py"
SEMEL_RUN: Final = (sys.executable, "-c", "from semel.cli.run import command; command()")
# A life is short here, and most of it is the start of its JVM.
QUICK_START: Final = tuple(
    argument for name, value in TEST_SETTINGS.items() for argument in ("--set", f"{name}={value}")
)
RUN_TIMEOUT_S: Final = 240.0
POLL_S: Final = 0.05
ROWS: Final = 200
LATE: Final = 7


class Supervised:
    """Topics with content, and runs of the pipeline, one after the other."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.directory = directory
        self.gate = directory / "gate"
        self.runs: list[subprocess.Popen[str]] = []
        self.below: list[psutil.Process] = []
        for topic, partitions in (("orders", 2), ("out", 3)):
            create_topic(bootstrap, topic, partitions)
        self.feed(0, ROWS)

    def feed(self, start: int, stop: int) -> None:
        produce(self.bootstrap, "orders", [Row(b"v%d" % i, b"k%d" % i) for i in range(start, stop)])

    def start(
        self, *arguments: str, stderr: Any = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        run = start_run(
            SUPERVISED,
            self.directory,
            *arguments,
            stderr=stderr,
            TEST_DIRECTORY=str(self.directory),
            TEST_BOOTSTRAP=self.bootstrap,
            **environment,
        )
        self.runs.append(run)
        return run

    def start_held(self) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        """A run whose first batch is under way and stays so; the run, and the processes below it."""
        begun = self.directory / "begun"
        begun.unlink(missing_ok=True)
        run = self.start(TEST_GATE=str(self.gate))
        until(lambda: begun.exists() or run.poll() is not None, "the batch begins")
        assert run.poll() is None
        below = psutil.Process(run.pid).children(recursive=True)
        self.below += below
        return run, below

    def committed(self) -> Counter[bytes | None]:
        return Counter(record.value for _, record in committed_records(self.bootstrap, "out"))

    def written(self) -> Counter[bytes | None]:
        return Counter(record.value for _, record in written_records(self.bootstrap, "out"))

    def check(self, rows: int = ROWS) -> None:
        check_rows(self.committed(), [b"v%d" % i for i in range(rows)])

    def count_batches(self) -> int:
        """How many are in Spark's commit log."""
        commits = (self.directory / "checkpoint" / "commits").iterdir()
        return sum(1 for path in commits if path.name.isdecimal())

    def count_unstable(self) -> int:
        """How many offsets of the source lie behind its last stable ones."""
        return asyncio.run(self._count_unstable())

    async def _count_unstable(self) -> int:
        wanted = {TopicPartition("orders", partition): LATEST for partition in range(2)}
        async with Cluster(self.bootstrap) as cluster:
            ends = await Admin(cluster).list_offsets(wanted)
            stable = await Admin(cluster).list_offsets(wanted, isolation_level=READ_COMMITTED)
        return sum(ends[where].offset - stable[where].offset for where in wanted)

    def has_open_transaction(self) -> bool:
        return asyncio.run(self._has_open_transaction())

    async def _has_open_transaction(self) -> bool:
        async with Cluster(self.bootstrap) as cluster:
            return (await TransactionAdmin(cluster).describe(transactional_id_of("supervised"))).is_open

    async def take(self) -> None:
        """What a second driver of the name does first."""
        async with KafkaSink(self.bootstrap, "out") as other:
            await other.open("supervised")


@pytest.fixture
def supervised(broker: BrokerProcess, tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(broker.bootstrap, tmp_path)
    yield supervised
    supervised.gate.touch()
    for run in supervised.runs:
        run.terminate()
        run.wait(RUN_TIMEOUT_S)
    for process in supervised.below:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def start_run(
    file: Path, directory: Path, *arguments: str, stderr: Any = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SEMEL_RUN, str(file), "--master", "local[2]", *QUICK_START, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
        cwd=directory,
    )


def until(holds: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + RUN_TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up, f"it did not come to pass that {what}"
        time.sleep(POLL_S)


class Terminal:
    """A screen to write errors to; `text` is all that was ever on it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._seen: list[bytes] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            while some := os.read(self._master, 65_536):
                self._seen.append(some)
        except OSError:
            pass  # Linux says so when the last writer is gone

    def text(self) -> str:
        """Call it when the writers have ended."""
        os.close(self.slave)
        self._reading.join(RUN_TIMEOUT_S)
        return b"".join(self._seen).decode()


def test_a_pipeline_that_dies_is_started_again_and_ends_when_it_has_caught_up(supervised: Supervised) -> None:
    """Its first life dies with its rows and its marker in an open transaction, its second after a commit."""
    port, screen = free_port(), Terminal()
    metrics = ("--metrics", f"127.0.0.1:{port}")
    run = supervised.start("--until-caught-up", *metrics, stderr=screen.slave, TEST_DEATHS="before-1 after-2")
    seen = watch_metrics(run, port)
    out, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    err = screen.text()
    assert run.returncode == 0, err
    assert err.count("started again") == 2
    assert {path.name for path in supervised.directory.glob("died-*")} == {"died-before-1", "died-after-2"}
    assert re.fullmatch(
        r"supervised: batch (\d), 1 skipped, epoch \1 committed, \d+ rows, [\d,]+ rows/s read, lag 0 "
        r"\| 2 restarts\n",
        out,
    )

    supervised.check()
    # What the first life left open was aborted by the second: long before the transaction's timeout.
    aborted = supervised.written() - supervised.committed()
    assert 0 < aborted.total() <= 50
    assert set(aborted.values()) == {1}
    assert not supervised.has_open_transaction()

    assert "semel_pipeline_restarts_total 2" in seen
    assert 'semel_pipeline_skips_total{pipeline="supervised"} 1' in seen

    bars = re.findall(r"\r\x1b\[2Ksupervised \[(#*)(-*)\] +(\d+) % [^\r]+ committed, ", err)
    assert bars, err
    assert {len(full) + len(rest) for full, rest, _ in bars} == {20}
    percents = [int(percent) for _, _, percent in bars]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert err.endswith("\r\x1b[2K"), "the bar is left on the screen"


def test_an_example_that_runs_again_skips_a_batch_that_sparks_log_has_forgotten(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """A join: what it remembers of the orders goes on to those that are paid later.

    All of it is of the first minutes of 1970: no watermark moves, and so the last batch is one with rows.
    """
    create_topic(broker.bootstrap, "paid", 4)
    for topic in ("orders", "payments"):
        create_topic(broker.bootstrap, topic, 3, retention_ms="-1")

    def feed(topic: str, start: int, stop: int) -> None:
        rows = [
            Row(b"%s %d" % (topic.encode(), i), b"k%d" % i, timestamp_ms=1000 * (i + 1))
            for i in range(start, stop)
        ]
        produce(broker.bootstrap, topic, rows)

    def run(stop: int) -> str:
        where = {"BOOTSTRAP": broker.bootstrap, "CHECKPOINTS": str(tmp_path)}
        started = start_run(PAID_ORDERS, tmp_path, "--until-caught-up", **where)
        out, err = started.communicate(timeout=RUN_TIMEOUT_S)
        assert started.returncode == 0, err
        found = committed_records(broker.bootstrap, "paid")
        wanted = [(b"k%d" % i, b"orders %d payments %d" % (i, i)) for i in range(stop)]
        check_rows(((record.key, record.value) for _, record in found), wanted)
        return out

    feed("orders", 0, ROWS)
    feed("payments", 0, ROWS // 2)
    assert "paid-orders: batch 0, epoch 0 committed, 100 rows" in run(ROWS // 2)
    commits = tmp_path / "paid-orders" / "commits"
    for name in ("0", ".0.crc"):
        (commits / name).unlink()
    feed("payments", ROWS // 2, ROWS)
    assert "paid-orders: batch 1, 1 skipped, epoch 1 committed, 100 rows" in run(ROWS)


def test_a_pipeline_is_kept_alive_on_a_cluster(supervised: Supervised, tmp_path: Path) -> None:
    with StandaloneCluster(tmp_path / "cluster") as cluster:
        run = supervised.start("--until-caught-up", "--master", cluster.url, TEST_DEATHS="before-1")
        _, err = run.communicate(timeout=RUN_TIMEOUT_S)
        assert "Registered app" in cluster.log
    assert run.returncode == 0, err
    assert err.count("started again") == 1
    supervised.check()


def watch_metrics(run: subprocess.Popen[str], port: int) -> str:
    """The last that the endpoint said."""
    seen = ""
    give_up = time.monotonic() + RUN_TIMEOUT_S
    while run.poll() is None and time.monotonic() < give_up:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                seen = answer.read().decode()
        except (URLError, OSError):
            pass  # not there yet, or gone
        time.sleep(0.1)
    return seen


@contextmanager
def open_transaction(bootstrap: str, rows: list[Row]) -> Iterator[Callable[[], None]]:
    """Orders that are there and not yet stable; whoever calls what it gives commits them."""
    thread = LoopThread("orders")
    cluster = Cluster(bootstrap)
    options = TransactionOptions(transaction_timeout_ms=round(RUN_TIMEOUT_S * 1000))
    producer = TransactionalProducer(cluster, "shop", options)

    async def write() -> None:
        await producer.open()
        await producer.begin()
        for row in rows:
            await producer.send("orders", row.value, key=row.key)
        await producer.flush()

    async def close() -> None:
        await producer.close()
        await cluster.close()

    try:
        thread.run(write())
        yield lambda: thread.run(producer.commit())
    finally:
        thread.run(close())
        thread.close()


def metrics_at(port: int) -> dict[str, float]:
    """What the endpoint says of the pipeline, by the names without their beginning."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (URLError, OSError):
        return {}  # not there yet, or gone
    told = re.findall(r'^semel_pipeline_(\w+)\{pipeline="supervised"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in told}


def until_read(run: subprocess.Popen[str], port: int, rows: int) -> dict[str, float]:
    """The metrics, when so many rows are out and there is no lag."""
    seen: list[dict[str, float]] = [{}]

    def is_read() -> bool:
        seen.append(metrics_at(port))
        return run.poll() is not None or (seen[-1].get("rows_total"), seen[-1].get("lag")) == (rows, 0)

    until(is_read, f"{rows} rows are out, with no lag")
    assert run.poll() is None
    return seen[-1]


def test_metrics_tell_of_rows_and_of_lag_to_the_last_stable_offset_until_the_pipeline_is_fenced_for_good(
    supervised: Supervised,
) -> None:
    """Neither who is fenced nor whose marker does not fit is started again."""
    port = free_port()
    late = [Row(b"v%d" % i, b"k%d" % i) for i in range(ROWS, ROWS + LATE)]
    with open_transaction(supervised.bootstrap, late) as commit:
        run = supervised.start("--trigger", "100 milliseconds", "--metrics", f"127.0.0.1:{port}")
        told = until_read(run, port, ROWS)
        assert supervised.count_unstable() == LATE, "there is nothing that could be taken for lag"
        supervised.check()
        batches = supervised.count_batches()
        assert batches >= 4
        assert told == {
            **told,
            "commits_total": batches,
            "committed_epoch": batches - 1,
            "skips_total": 0,
            "aborts_total": 0,
            "active": 1,
        }
        assert told["rows_per_second"] > 0
        commit()
        assert until_read(run, port, ROWS + LATE)["commits_total"] > batches
    asyncio.run(supervised.take())
    supervised.feed(ROWS + LATE, ROWS + LATE + 20)
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 2, err
    assert re.search(rf"FencedOut: .*process {os.getpid()} on ", err)
    supervised.check(ROWS + LATE)

    adopt = ["sink", "adopt", "supervised", "--epoch", "70", "--bootstrap", supervised.bootstrap]
    assert CliRunner().invoke(root, adopt).exit_code == 0
    run = supervised.start("--until-caught-up")
    _, mismatch = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 2, mismatch
    assert re.search("MarkerMismatch: .*rolled back.*semel sink adopt", mismatch)
    assert "started again" not in err + mismatch
    supervised.check(ROWS + LATE)


def test_a_batch_under_way_is_aborted_when_the_run_is_terminated_or_its_supervisor_dies(
    supervised: Supervised,
) -> None:
    run, below = supervised.start_held()
    run.terminate()
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, err
    assert all_gone(below)
    assert not supervised.has_open_transaction()

    run, below = supervised.start_held()
    run.kill()
    run.wait(RUN_TIMEOUT_S)
    assert all_gone(below), "the pipeline runs on, and nobody looks after it"
    assert not supervised.has_open_transaction()
    check_rows(supervised.committed(), [])

    supervised.gate.touch()
    run = supervised.start("--until-caught-up")
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, err
    supervised.check()


def all_gone(processes: list[psutil.Process]) -> bool:
    assert processes
    return not psutil.wait_procs(processes, timeout=RUN_TIMEOUT_S / 4)[1]


def test_a_row_that_the_target_cannot_take_is_not_tried_again(supervised: Supervised) -> None:
    alter_topic(supervised.bootstrap, "out", max_message_bytes="1000")
    large = b"v" * 2000
    produce(supervised.bootstrap, "orders", [Row(large, b"large")])
    run = supervised.start("--until-caught-up")
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 2, err
    assert re.search("^WriteFailed: .*cannot be written", err, re.MULTILINE), err
    assert "started again" not in err
    assert not supervised.has_open_transaction()
    committed = supervised.committed()
    assert committed, "batches before it are there"
    check_rows(committed, committed.keys() - {large})


FAULTY: Final = """
import semel.spark
from semel.sinks import KafkaSink

def pipeline(spark):
    rows = semel.spark.read(spark, {bootstrap!r}, {source!r})
    sink = KafkaSink({bootstrap!r}, "out")
    return semel.spark.exactly_once(rows, sink, name="faulty", checkpoint={checkpoint!r})
"""


@pytest.mark.parametrize(
    ("source", "arguments", "told"),
    [
        (
            "ordres",
            (),
            r"there is no topic 'ordres' to read from at \S+: check the name with `semel topic list`",
        ),
        ("in", ("--trigger", "1 fortnight"), r"Spark does not take the trigger .*1 fortnight"),
        ("in", ("--master", "foo"), r"Spark knows no master 'foo'"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_not_started_again(
    broker: BrokerProcess, tmp_path: Path, source: str, arguments: tuple[str, ...], told: str
) -> None:
    for topic in ("in", "out"):
        create_topic(broker.bootstrap, topic, 1)
    file = tmp_path / "faulty.py"
    checkpoint = tmp_path / "checkpoint"
    file.write_text(FAULTY.format(bootstrap=broker.bootstrap, source=source, checkpoint=str(checkpoint)))
    run = start_run(file, tmp_path, *arguments)
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 2, err
    # Once; Spark's own processes may have something to say as they end, after it.
    mistakes = [line for line in err.splitlines() if line.startswith("ConfigError: ")]
    assert len(mistakes) == 1, err
    assert re.match(f"ConfigError: {told}", mistakes[0]), err
    assert "Traceback" not in err.partition(mistakes[0])[0]
    assert not checkpoint.exists()
