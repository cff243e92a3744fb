"""The journal does not grow from restart to restart: a start goes on where the last checkpoint was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.embedded import Broker

JOURNAL_FILE_BYTES = 1024 * 1024
LIFE_BYTES = 300 * 1024
LIVES = 8
WAIT_S = 20.0


def broker(directory: Path, **intervals: int) -> Broker:
    settings: dict[str, str | int | bool] = {
        "journal.file.bytes": JOURNAL_FILE_BYTES,
        "storage.min.free.bytes": 0,
        **{f"{name}.interval.bytes": value for name, value in intervals.items()},
    }
    return Broker(directory, settings=settings)


async def create(bootstrap: str) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic("t")


async def produce(bootstrap: str) -> None:
    async with Cluster(bootstrap) as cluster, Producer(cluster) as producer:
        for _ in range(LIFE_BYTES // 10_000):
            await producer.send("t", b"x" * 10_000)


def snapshots(directory: Path) -> set[str]:
    return {path.name for path in (directory / "snapshots").glob("*.snapshot")}


def journal_start(directory: Path) -> int:
    """The position at which the oldest file of the journal begins."""
    return min(int(path.name.split("-")[0]) for path in (directory / "journal").glob("*.journal"))


def wait_for_a_snapshot(directory: Path, before: set[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not snapshots(directory) - before:
        assert time.monotonic() < deadline, "no checkpoint was taken"
        time.sleep(0.02)


@pytest.mark.parametrize("due", ["flush", "snapshot"])
def test_what_many_short_lives_wrote_is_checkpointed_by_the_next(tmp_path: Path, due: str) -> None:
    # No life by itself writes enough for a checkpoint; all of them together write much more.
    enough = {"flush": LIFE_BYTES * 3, "snapshot": LIFE_BYTES * 3}
    never = {"flush": 1 << 40, "snapshot": 1 << 40}
    for life in range(LIVES):
        with broker(tmp_path, **never) as running:
            if life == 0:
                asyncio.run(create(running.bootstrap))
            asyncio.run(produce(running.bootstrap))
        if due == "snapshot":
            # As after a kill: the snapshot of the stop is not there.
            for name in snapshots(tmp_path):
                (tmp_path / "snapshots" / name).unlink()
    before = snapshots(tmp_path)
    with broker(tmp_path, **{**never, due: enough[due]}):
        wait_for_a_snapshot(tmp_path, before)
    if due == "flush":
        with broker(tmp_path, **never):
            pass
        assert journal_start(tmp_path) > 0
