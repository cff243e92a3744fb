"""A program that runs epochs into a Kafka sink, and dies or falls asleep where it is told to.

`kafka_driver BOOTSTRAP TOPIC SINK_ID EPOCHS [STEP kill|stop]`: the step is one of STEPS, in the last epoch.
It says `at STEP` before it happens. In the end it prints `done`, or the class and the message of what went
wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "broker"))

from semel.client.shared_transaction import SharedTransaction
from semel.sinks.errors import SinkError
from semel.sinks.kafka import KafkaPlan, KafkaSink
from semel.sinks.marker import Marker, Owner
from semel.sinks.receipts import Origin, Place, Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.source_group import SourceOffsets

PARTITIONS = 4
TASKS = 2
ROWS_A_TASK = 50
STEPS = (
    "before the fence",
    "after the fence",
    "signed",
    "begun",
    "half written",
    "written",
    "finished",
    "before the marker",
    "before the commit",
    "committed",
)


class StepSink(KafkaSink):
    """A sink that stops dead, or falls asleep, at a step."""

    def __init__(self, bootstrap: str, topic: str, *, step: str = "", how: str = "kill") -> None:
        # So few that rows are on the broker when the driver stops half way.
        settings = SinkSettings(max_buffered=10)
        super().__init__(bootstrap, topic, key=None, partition_column="partition", settings=settings)
        self._step = step
        self._how = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        self.is_last_epoch = False

    def reach(self, step: str) -> None:
        opening = STEPS.index(step) < STEPS.index("begun")
        if step == self._step and (opening or self.is_last_epoch):
            print("at", step, flush=True)
            self._step = ""
            os.kill(os.getpid(), self._how)

    async def _open(self, owner: Owner) -> Marker:
        self.reach("before the fence")
        marker = await super()._open(owner)
        self.reach("signed")
        return marker

    async def _sign(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        self.reach("after the fence")
        await super()._sign(transaction, marker, owner)

    async def _begin(self, place: Place) -> KafkaPlan:
        plan = await super()._begin(place)
        self.reach("begun")
        return plan

    async def _put_marker(
        self, transaction: SharedTransaction, marker: Marker, source_offsets: SourceOffsets | None
    ) -> None:
        self.reach("before the marker")
        await super()._put_marker(transaction, marker, source_offsets)
        self.reach("before the commit")

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        await super()._end(transaction, epoch)
        self.reach("committed")


def rows_of(epoch: int, task: int) -> list[dict[str, object]]:
    """Each task has partitions of its own."""
    return [
        {"value": value_of(epoch, task, number), "partition": task + TASKS * (number % (PARTITIONS // TASKS))}
        for number in range(ROWS_A_TASK)
    ]


def value_of(epoch: int, task: int, number: int) -> bytes:
    return b"%d-%d-%d" % (epoch, task, number)


def expected(epochs: int) -> list[list[bytes]]:
    """What each partition holds after so many epochs, in order."""
    partitions: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for epoch in range(epochs):
        for task in range(TASKS):
            for number in range(ROWS_A_TASK):
                partition = task + TASKS * (number % (PARTITIONS // TASKS))
                partitions[partition].append(value_of(epoch, task, number))
    return partitions


def origin_of(epoch: int) -> Origin:
    return Origin("query", f"digest {epoch}")


async def run_epoch(sink: KafkaSink, epoch: int) -> None:
    plan = await sink.begin(epoch, origin_of(epoch))
    if plan is None:
        return
    receipts: list[Receipt] = []
    for task in range(TASKS):
        writer = plan.writer(task, tasks=TASKS)
        rows = rows_of(epoch, task)
        await writer.write(rows[: ROWS_A_TASK // 2])
        reach(sink, "half written", task)
        await writer.write(rows[ROWS_A_TASK // 2 :])
        reach(sink, "written", task)
        receipts.append(await writer.finish())
        reach(sink, "finished", task)
    await sink.commit(epoch, receipts)


def reach(sink: KafkaSink, step: str, task: int) -> None:
    if isinstance(sink, StepSink) and task == TASKS - 1:
        sink.reach(step)


async def run_epochs(sink: KafkaSink, sink_id: str, epochs: int) -> None:
    """As after a restart: the last epoch that was committed is run once more."""
    last = await sink.open(sink_id)
    for epoch in range(0 if last is None else last, epochs):
        if isinstance(sink, StepSink):
            sink.is_last_epoch = epoch == epochs - 1
        await run_epoch(sink, epoch)
    await sink.close()


async def main(bootstrap: str, topic: str, sink_id: str, epochs: str, step: str = "", how: str = "") -> int:
    sink = StepSink(bootstrap, topic, step=step, how=how)
    try:
        await run_epochs(sink, sink_id, int(epochs))
    except SinkError as error:
        print(type(error).__name__, error, flush=True)
        return 1
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
