"""A SQL sink whose processes die or fall asleep at every step: the table holds each row once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from driver_program import Driver
from sql_driver import (
    SINK_ID,
    STEPS,
    WRITER_STEPS,
    Stopper,
    expected,
    make_sink,
    origin_of,
    run_epoch,
    run_epochs,
)
from table_cases import STRATEGIES, MakeTable, Table

from row_checks import about_rows, check_rows

DRIVER = Path(__file__).with_name("sql_driver.py")
EPOCHS = 2
NEVER = Stopper("", "kill")
# Rows are moved by the staged strategy only.
CASES = [
    (strategy, step)
    for strategy in STRATEGIES
    for step in STEPS
    if (strategy, step) != ("direct", "rows moved")
]


def drive(table: Table, strategy: str, step: str, how: str) -> Driver:
    return Driver(DRIVER, table.address(), strategy, EPOCHS, step, how)


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table("id bigint, value text")  # without a key: a row that is written twice is there twice


@pytest.mark.parametrize(("strategy", "step"), CASES)
async def test_a_driver_that_is_killed_leaves_every_row_once(table: Table, strategy: str, step: str) -> None:
    driver = drive(table, strategy, step, "kill")
    assert driver.last_words().splitlines()[-1] == f"at {step}"
    assert driver.exit_code == -signal.SIGKILL
    with about_rows():
        assert table.kept() in (expected(0), expected(EPOCHS - 1), expected(EPOCHS)), "an epoch is half there"
    async with make_sink(table.address(), strategy) as sink:
        await run_epochs(sink, EPOCHS, NEVER)
    check_rows(table.kept(), expected(EPOCHS))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", WRITER_STEPS)
async def test_a_writer_that_is_killed_leaves_every_row_once(table: Table, step: str, strategy: str) -> None:
    said = drive(table, strategy, step, "kill").last_words()
    assert "died with -9" in said
    assert said.splitlines()[-1] == "done"
    check_rows(table.kept(), expected(EPOCHS))


@pytest.mark.parametrize(("strategy", "step"), CASES)
async def test_a_zombie_driver_is_fenced_and_does_not_fence_the_living(
    table: Table, strategy: str, step: str
) -> None:
    zombie = drive(table, strategy, step, "stop")
    try:
        zombie.wait_until_stopped()
        async with make_sink(table.address(), strategy) as living:
            await run_epochs(living, EPOCHS, NEVER)
            check_rows(table.kept(), expected(EPOCHS))
            said = zombie.wake()
            if step in ("commit answered", "committed"):
                assert said.splitlines()[-1] == "done"  # it had nothing more to do
            else:
                assert "FencedOut" in said, said
                assert f"process {os.getpid()}" in said
                assert zombie.exit_code == 3
            await run_epoch(living, EPOCHS, NEVER)
            assert living.marker.epoch == EPOCHS
    finally:
        zombie.kill()
    check_rows(table.kept(), expected(EPOCHS + 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", WRITER_STEPS)
async def test_a_zombie_writer_does_no_harm(table: Table, step: str, strategy: str) -> None:
    """It wakes up while a later attempt at its epoch, and then a later epoch, is being written."""
    driver = drive(table, strategy, step, "stop")
    try:
        line = driver.read_line().split()
        assert line[0] == "sleeping" and line[2] == "at", line
        pid = int(line[1])
        assert driver.last_words().splitlines()[-1] == "done"
        check_rows(table.kept(), expected(EPOCHS))
        async with make_sink(table.address(), strategy) as living:
            assert await living.open(SINK_ID) == EPOCHS - 1
            assert await living.begin(EPOCHS - 1, origin_of(EPOCHS - 1)) is None
            os.kill(pid, signal.SIGCONT)
            await run_epoch(living, EPOCHS, NEVER)
            await run_epoch(living, EPOCHS + 1, NEVER)
    finally:
        driver.kill()
    check_rows(table.kept(), expected(EPOCHS + 2))
