"""A program with transactions over a topic and a database that dies, or falls asleep, after a given step.

    atomic_driver.py BOOTSTRAP DSN LABEL STEP SIGNAL NUMBER…

It pays the numbers, one transaction each. During the last of them, or while it opens for steps of recovery,
it sends itself the signal right after the step. What becomes of it is said on stdout, a line each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from atomic_cases import QUICK, Target, pay

from semel.client.producer import PendingRecord, ProducerIdentity
from semel.client.shared_transaction import Resumed
from semel.client.transactional_producer import TransactionalProducer
from semel.sinks.atomic import Atomic
from semel.sinks.atomic.database import Result, Saved, SlotRow
from semel.sinks.atomic.slot import Recovered, Slot
from semel.sinks.errors import FencedOut, SinkError

# Up to these, a transaction is dropped. After the others, it is there.
BEFORE_DECISION = ("begin", "execute", "publish", "prepare", "save")
AFTER_DECISION = ("decide", "complete")
RECOVERY = ("raise", "claim", "look", "resume", "end")


class Stopper:
    """Sends the signal once, when it is armed and the step is reached."""

    def __init__(self, step: str, number: signal.Signals) -> None:
        self.step = step
        self.number = number
        self.is_armed = step in RECOVERY

    def after(self, step: str) -> None:
        if self.is_armed and step == self.step:
            self.is_armed = False
            say(f"at {step}")
            os.kill(os.getpid(), self.number)


class SteppedSlot(Slot):
    stopper: Stopper

    async def begin(self) -> None:
        await super().begin()
        self.stopper.after("begin")

    async def execute(self, query: object, params: object = None) -> Result:
        result = await super().execute(query, params)  # type: ignore[arg-type]
        self.stopper.after("execute")
        return result

    async def publish(self, topic: str, value: bytes | None, **options: object) -> PendingRecord:
        pending = await super().publish(topic, value, **options)  # type: ignore[arg-type]
        self.stopper.after("publish")
        return pending

    async def prepare(self) -> ProducerIdentity | None:
        pair = await super().prepare()
        self.stopper.after("prepare")
        return pair

    async def save(self, pair: ProducerIdentity | None) -> None:
        await super().save(pair)
        self.stopper.after("save")

    async def decide(self) -> None:
        await super().decide()
        self.stopper.after("decide")

    async def complete(self) -> None:
        await super().complete()
        self.stopper.after("complete")

    async def claim(self) -> Saved:
        saved = await super().claim()
        self.stopper.after("claim")
        return saved

    async def look(self) -> None:
        await super().look()
        self.stopper.after("look")

    async def resume(self, pair: ProducerIdentity | None) -> tuple[TransactionalProducer, Resumed]:
        found = await super().resume(pair)
        self.stopper.after("resume")
        return found

    async def end(self, producer: TransactionalProducer, found: Resumed) -> Recovered:
        recovered = await super().end(producer, found)
        self.stopper.after("end")
        return recovered


class SteppedAtomic(Atomic):
    stopper: Stopper

    async def _take(self) -> list[SlotRow]:
        rows = await super()._take()
        self.stopper.after("raise")
        return rows

    def _make_slot(self, row: SlotRow, cluster_id: str | None) -> Slot:
        slot = SteppedSlot(row, self._cluster, cluster_id, self._postgres, self.settings)
        slot.stopper = self.stopper
        return slot


def say(what: str) -> None:
    print(what, flush=True)


async def run(target: Target, stopper: Stopper, numbers: list[int]) -> None:
    atomic = SteppedAtomic(target.bootstrap, target.dsn, target.label, 1, QUICK)
    atomic.stopper = stopper
    try:
        await atomic.open()
        for number in numbers:
            stopper.is_armed = stopper.is_armed or number == numbers[-1]
            await pay(atomic, number)
            say(f"paid {number}")
        # A sleeper that was stopped after its last step learns with its next transaction.
        await pay(atomic, numbers[-1] + 1_000)
        say(f"paid {numbers[-1] + 1_000}")
    except FencedOut as error:
        say(f"fenced: {error}")
    except SinkError as error:
        say(f"failed: {type(error).__name__}: {error}")
        try:
            await pay(atomic, numbers[-1] + 1_000)
        except FencedOut as fenced:
            say(f"fenced: {fenced}")
    except Exception as error:
        say(f"raised: {type(error).__name__}: {error}")
    finally:
        await atomic.close()


def main() -> None:
    bootstrap, dsn, label, step, number, *numbers = sys.argv[1:]
    stopper = Stopper(step, signal.Signals[number])
    asyncio.run(run(Target(bootstrap, dsn, label), stopper, [int(each) for each in numbers]))


if __name__ == "__main__":
    main()
