"""A process that is one task of an epoch: `kafka_task TASK EPOCH [STEP kill|stop]`, with its plan on stdin.

It writes the rows that `kafka_driver` has for the task. At the step, one of TASK_STEPS, it says `at STEP` and
dies or falls asleep. In the end it says `receipt` and its receipt, or the class and the message of what went
wrong.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from base64 import b64decode, b64encode

from kafka_driver import ROWS_A_TASK, TASKS, rows_of

from semel.sinks.errors import SinkError
from semel.sinks.kafka import KafkaPlan

TASK_STEPS = ("began", "half written", "written", "finished")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def reach(step: str, wanted: str, how: str) -> None:
    if step == wanted:
        print("at", step, flush=True)
        os.kill(os.getpid(), SIGNALS[how])


async def run(plan: KafkaPlan, task: int, epoch: int, step: str = "", how: str = "") -> None:
    rows = rows_of(epoch, task)
    writer = plan.writer(task, tasks=TASKS)
    reach("began", step, how)
    await writer.write(rows[: ROWS_A_TASK // 2])
    reach("half written", step, how)
    await writer.write(rows[ROWS_A_TASK // 2 :])
    reach("written", step, how)
    receipt = await writer.finish()
    reach("finished", step, how)
    print("receipt", b64encode(pickle.dumps(receipt)).decode(), flush=True)


if __name__ == "__main__":
    given = pickle.loads(b64decode(sys.stdin.readline()))
    try:
        asyncio.run(run(given, int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
    except SinkError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(1)
