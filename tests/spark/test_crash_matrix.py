"""The crash matrix: the driver is killed with -9 at every step of an epoch, and the output equals the input.

Each test is a chain of lives of one program (`pipelines/crashing.py`). A life finishes what the one before
left behind, and dies at its own step; the last one reads to the end. What is in the output topics is then
compared with the input, by content.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from broker_process import BrokerProcess
from spark_cases import Row, StartDriver, committed_records, create_topic, produce_transaction

CRASHING: Final = Path(__file__).parent / "pipelines" / "crashing.py"
STEPS: Final = (
    "before_begin",
    "after_tasks",
    "before_marker",
    "before_end",
    "after_end",
    "in_recovery",
)
BEGIN_MS: Final = 1_700_000_000_000
STEP_MS: Final = 250
WINDOW_S: Final = 5
ORDERS: Final = 400


def feed(bootstrap: str) -> None:
    """Orders, payments and numbers, in transactions, every fourth of which is aborted."""
    for topic, partitions in (("orders", 3), ("payments", 2), ("numbers", 2)):
        create_topic(bootstrap, topic, partitions, retention_ms="-1")
    for start in range(0, ORDERS, 80):
        some = range(start, start + 80)
        produce_transaction(bootstrap, "orders", [order(i) for i in some])
        produce_transaction(bootstrap, "payments", [payment(i) for i in some])
        produce_transaction(bootstrap, "numbers", [number(i) for i in some])
        for topic in ("orders", "payments", "numbers"):
            aborted = [Row(b"999999", b"aborted", timestamp_ms=time_of(i)) for i in some]
            produce_transaction(bootstrap, topic, aborted, commit=False)
    # Far in the future: closes every window.
    produce_transaction(
        bootstrap, "numbers", [Row(b"0", b"end", partition=p, timestamp_ms=time_of(10_000)) for p in (0, 1)]
    )


def time_of(i: int) -> int:
    return BEGIN_MS + i * STEP_MS


def order(i: int) -> Row:
    return Row(b"order %d" % i, b"key %d" % i, timestamp_ms=time_of(i))


def payment(i: int) -> Row:
    return Row(b"payment %d" % i, b"key %d" % i, timestamp_ms=time_of(i + 4))


def number(i: int) -> Row:
    return Row(b"%d" % i, timestamp_ms=time_of(i), partition=i % 2)


def expected_records() -> Counter[tuple[bytes | None, bytes | None]]:
    return Counter((b"key %d" % i, b"ORDER %d" % i) for i in range(ORDERS))


def expected_values() -> Counter[tuple[bytes | None, bytes | None]]:
    return Counter((None, b"ORDER %d" % i) for i in range(ORDERS))


def expected_join() -> Counter[tuple[bytes | None, bytes | None]]:
    return Counter((b"key %d" % i, b"order %d+payment %d" % (i, i)) for i in range(ORDERS))


def expected_windows() -> Counter[tuple[bytes | None, bytes | None]]:
    sums: dict[int, list[int]] = {}
    for i in range(ORDERS):
        start = time_of(i) // 1000 // WINDOW_S * WINDOW_S
        sums.setdefault(start, []).append(i)
    return Counter(
        (str(start).encode(), json.dumps({"count": len(of), "sum": sum(of)}, separators=(",", ":")).encode())
        for start, of in sums.items()
    )


EXPECTED: Final = {
    "keyed": expected_records,
    "unkeyed": expected_values,
    "windows": expected_windows,
    "windows2": expected_windows,
    "join": expected_join,
}


def check_output(bootstrap: str, pipeline: str) -> None:
    found = Counter(
        (record.key, record.value) for _, record in committed_records(bootstrap, f"{pipeline}-out")
    )
    expected = EXPECTED[pipeline]()
    assert found - expected == Counter(), f"{pipeline}: doubled, or never written"
    assert expected - found == Counter(), f"{pipeline}: lost"


def live_through(
    start_driver: StartDriver,
    bootstrap: str,
    directory: Path,
    pipelines: tuple[str, ...],
    deaths: Iterable[str],
) -> None:
    """One life for each death, then one that reads to the end."""
    for life, death in enumerate(deaths):
        # Another number of shuffle partitions in every life: a replayed batch is cut differently.
        environment = {"TEST_DIE": death, "TEST_SHUFFLE_PARTITIONS": str(2 + life % 2)}
        driver = start_driver(CRASHING, bootstrap, directory, *pipelines, environment=environment)
        driver.wait()
        assert "dying" in driver.log, f"nobody died at {death}:\n{driver.log[-6000:]}"
    start_driver(CRASHING, bootstrap, directory, *pipelines).succeed()
    for pipeline in pipelines:
        check_output(bootstrap, pipeline)


def prepare(bootstrap: str, pipelines: Iterable[str]) -> None:
    feed(bootstrap)
    for pipeline in pipelines:
        create_topic(bootstrap, f"{pipeline}-out", 4)


def test_stateless_pipelines_survive_a_driver_killed_at_every_step(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    pipelines = ("keyed", "unkeyed")
    prepare(broker.bootstrap, pipelines)
    deaths = [f"keyed:{step}" for step in STEPS]
    live_through(start_driver, broker.bootstrap, tmp_path / "checkpoints", pipelines, deaths)
