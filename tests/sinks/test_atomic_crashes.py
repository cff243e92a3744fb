"""kill -9 and SIGSTOP after every step of a transaction over a topic and a database, and of its recovery."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from atomic_cases import QUICK, Target, pay
from atomic_driver import AFTER_DECISION, BEFORE_DECISION, RECOVERY

from row_checks import check_rows
from semel.sinks.atomic import Atomic
from semel.sinks.atomic.database import SlotRow
from semel.sinks.atomic.slot import Slot
from semel.sinks.errors import CommitFailed

DRIVER = Path(__file__).with_name("atomic_driver.py")
STEPS = (*BEFORE_DECISION, *AFTER_DECISION)


class Driver:
    """The program in a process of its own."""

    def __init__(self, target: Target, step: str, number: str, *numbers: int) -> None:
        arguments = [target.bootstrap, target.dsn, target.label, step, number, *map(str, numbers)]
        self._process = subprocess.Popen(
            [sys.executable, DRIVER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # It imports what this test does.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.said: list[str] = []

    async def until(self, prefix: str) -> None:
        """Waits for a line that begins so."""
        await asyncio.to_thread(self._read_until, prefix)

    def _read_until(self, prefix: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            self.said.append(line.strip())
            if line.startswith(prefix):
                return
        raise AssertionError(f"it said {self.said}, then ended: {self._process.stderr.read()}")

    async def ended(self) -> int:
        """Its exit code, once it has ended; what it said until then is in `said`."""
        rest, _ = await asyncio.to_thread(self._process.communicate)
        self.said += rest.split("\n")[:-1]
        return self._process.returncode

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def drivers(target: Target) -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.close()


def start(drivers: list[Driver], target: Target, step: str, number: str, *numbers: int) -> Driver:
    drivers.append(Driver(target, step, number, *numbers))
    return drivers[-1]


def expected(step: str) -> list[int]:
    return [1, 2, 3] if step in AFTER_DECISION else [1, 2]


@pytest.mark.parametrize("step", STEPS)
async def test_a_program_killed_after_any_step_leaves_both_halves_or_none(
    target: Target, drivers: list[Driver], step: str
) -> None:
    assert await start(drivers, target, step, "SIGKILL", 1, 2, 3).ended() == -signal.SIGKILL
    async with target.open() as atomic:
        check_rows(await target.both(), expected(step))
        assert atomic.metrics.recovered_commits == (step == "decide")
        if step not in AFTER_DECISION:
            await pay(atomic, 3)
        await pay(atomic, 4)
        check_rows(await target.both(), [1, 2, 3, 4])


@pytest.mark.parametrize("step", STEPS)
async def test_a_sleeper_woken_after_any_step_changes_nothing_and_does_not_stop_the_living(
    target: Target, drivers: list[Driver], step: str
) -> None:
    sleeper = start(drivers, target, step, "SIGSTOP", 1, 2, 3)
    await sleeper.until(f"at {step}")
    async with target.open() as atomic:
        check_rows(await target.both(), expected(step))
        await pay(atomic, 10)
        sleeper.wake()
        await pay(atomic, 11)
        assert await sleeper.ended() == 0
        assert any(line.startswith("fenced: ") for line in sleeper.said), sleeper.said
        await pay(atomic, 12)
        check_rows(await target.both(), [*expected(step), 10, 11, 12])


@pytest.mark.parametrize("left_at", ["prepare", "decide"])
@pytest.mark.parametrize("step", RECOVERY)
async def test_a_recovery_killed_after_any_step_is_done_by_the_next(
    target: Target, drivers: list[Driver], step: str, left_at: str
) -> None:
    await start(drivers, target, left_at, "SIGKILL", 1, 2, 3).ended()
    assert await start(drivers, target, step, "SIGKILL", 5).ended() == -signal.SIGKILL
    async with target.open() as atomic:
        check_rows(await target.both(), expected(left_at))
        await pay(atomic, 4)
        check_rows(await target.both(), [*expected(left_at), 4])


@pytest.mark.parametrize("left_at", ["prepare", "decide"])
@pytest.mark.parametrize("step", RECOVERY)
async def test_a_recovery_that_slept_after_any_step_does_not_stop_the_living(
    target: Target, drivers: list[Driver], step: str, left_at: str
) -> None:
    await start(drivers, target, left_at, "SIGKILL", 1, 2, 3).ended()
    sleeper = start(drivers, target, step, "SIGSTOP", 5)
    await sleeper.until(f"at {step}")
    async with target.open(pool=1) as atomic:
        await pay(atomic, 10)
        sleeper.wake()
        assert await sleeper.ended() == 0
        assert any(line.startswith("fenced: ") for line in sleeper.said), sleeper.said
        if step == "look":  # its InitProducerId came late: one transaction meets it, and may be run again
            with pytest.raises(CommitFailed):
                await pay(atomic, 11)
        await pay(atomic, 11)
        await pay(atomic, 12)
        check_rows(await target.both(), [*expected(left_at), 10, 11, 12])


class GatedSlot(Slot):
    """Waits between the decision and its completion."""

    decided: asyncio.Event
    go_on: asyncio.Event

    async def complete(self) -> None:
        self.decided.set()
        await self.go_on.wait()
        await super().complete()


class GatedAtomic(Atomic):
    def __init__(self, target: Target) -> None:
        super().__init__(target.bootstrap, target.dsn, target.label, 1, QUICK)
        self.decided, self.go_on = asyncio.Event(), asyncio.Event()

    def _make_slot(self, row: SlotRow, cluster_id: str | None) -> Slot:
        slot = GatedSlot(row, self._cluster, cluster_id, self._postgres, self.settings)
        slot.decided, slot.go_on = self.decided, self.go_on
        return slot


async def test_a_sleeping_recovery_cannot_abort_what_its_successor_has_decided(
    target: Target, drivers: list[Driver]
) -> None:
    """The sleeper read the row, and asks Kafka when the successor is between COMMIT and EndTxn."""
    sleeper = start(drivers, target, "look", "SIGSTOP", 5)
    await sleeper.until("at look")
    async with GatedAtomic(target) as atomic:
        paying = asyncio.create_task(pay(atomic, 10))
        await atomic.decided.wait()
        sleeper.wake()
        assert await sleeper.ended() == 0
        assert any(line.startswith("fenced: ") for line in sleeper.said), sleeper.said
        atomic.go_on.set()
        await paying
        assert atomic.metrics.mended == 1, "the sleeper did not fence the producer, so this showed nothing"
        await pay(atomic, 11)
        check_rows(await target.both(), [10, 11])


async def test_a_pool_that_shrank_is_recovered_whole(target: Target, drivers: list[Driver]) -> None:
    async with target.open(pool=3) as atomic:
        held = [atomic._ready.get_nowait() for _ in range(2)]
        slot = atomic._slots[2]
        await slot.begin()
        await slot.execute("INSERT INTO payments VALUES (7)")
        await slot.publish(target.label, b"7")
        await slot.save(await slot.prepare())
        await slot.decide()
        assert len(held) == 2
        # Here the process would die: the third slot's transaction is decided and not completed.
        async with target.open(pool=1) as successor:
            assert successor.metrics.recovered_commits == 1
            check_rows(await target.both(), [7])
