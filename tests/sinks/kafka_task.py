"""A process that is one task of an epoch: `kafka_task TASK EPOCH run|kill|stop`, its plan on a line of stdin.

It writes half of the rows that `kafka_driver` has for the task, says `halfway`, and goes on, dies or falls
asleep. In the end it says `receipt` and its receipt, or the class and the message of what went wrong.
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

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


async def run(plan: KafkaPlan, task: int, epoch: int, how: str) -> None:
    rows = rows_of(epoch, task)
    writer = plan.writer(task, tasks=TASKS)
    await writer.write(rows[: ROWS_A_TASK // 2])
    print("halfway", flush=True)
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
    await writer.write(rows[ROWS_A_TASK // 2 :])
    print("receipt", b64encode(pickle.dumps(await writer.finish())).decode(), flush=True)


if __name__ == "__main__":
    given = pickle.loads(b64decode(sys.stdin.readline()))
    try:
        asyncio.run(run(given, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
    except SinkError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(1)
