"""A Kafka sink whose processes die or fall asleep at every step, on Semel and on Apache Kafka."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from driver_program import Driver
from kafka_driver import PARTITIONS, STEPS, StepSink, expected, origin_of, run_epoch, run_epochs
from transaction_cases import make_topic, read_committed

from row_checks import about_rows
from semel.client.cluster import Cluster

DRIVER = Path(__file__).with_name("kafka_driver.py")
EPOCHS = 3


def drive(bootstrap: str, topic: str, sink_id: str, step: str, how: str) -> Driver:
    return Driver(DRIVER, bootstrap, topic, sink_id, EPOCHS, step, how)


@pytest.mark.parametrize("step", STEPS)
async def test_a_driver_that_is_killed_leaves_every_row_once(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, step: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    driver = drive(bootstrap, topic, sink_id, step, "kill")
    assert driver.last_words() == f"at {step}\n"
    assert driver.exit_code == -signal.SIGKILL
    await run_epochs(StepSink(bootstrap, topic), sink_id, EPOCHS)
    with about_rows():
        assert await read_committed(cluster, topic) == expected(EPOCHS)


@pytest.mark.parametrize(
    "step", ["after the fence", "begun", "half written", "finished", "before the marker", "before the commit"]
)
async def test_a_driver_that_wakes_up_late_is_fenced_and_fences_nobody(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, step: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    sleeper = drive(bootstrap, topic, sink_id, step, "stop")
    try:
        sleeper.wait_until_stopped()
        async with StepSink(bootstrap, topic) as living:
            last = await living.open(sink_id)
            for epoch in range(0 if last is None else last, EPOCHS - 1):
                await run_epoch(living, epoch)
            plan = await living.begin(EPOCHS - 1, origin_of(EPOCHS - 1))
            assert plan is not None
            said = sleeper.wake()
            assert said.startswith(
                f"FencedOut sink '{sink_id}' was fenced by process {psutil.Process().pid} on "
            )
            assert sleeper.exit_code == 1
            await living.abort(EPOCHS - 1)
            await run_epoch(living, EPOCHS - 1)
    finally:
        sleeper.kill()
    with about_rows():
        assert await read_committed(cluster, topic) == expected(EPOCHS)
