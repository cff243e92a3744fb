"""What runs in the tasks of Spark: a task's rows become a receipt, or the error that spoils the epoch.

An error of the sink travels as a value, so that the owner knows its class and Spark does not try the task
again. So does whatever else a writer raises: another try at the task would hide it behind its own refusal,
and whether another try at the epoch would meet it again nobody knows. Where each output may be written by one
attempt only (Kafka), a later attempt sends nothing. It reads its input to the end first: if it was the user's
code that failed the first attempt, it fails again there, and that is the error to be shown.

Executors import this module, and with it `semel.sinks`, `semel.client` and `semel.wire` alone.
"""

import pickle
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from semel.client.settled_heap import settle
from semel.sinks.blocking import BlockingWriter
from semel.sinks.errors import SinkError, WriteFailed
from semel.sinks.receipts import Receipt
from semel.sinks.sink import WriterPlan

OUTCOME_COLUMN: Final = "outcome"
OUTCOME_SCHEMA: Final = f"{OUTCOME_COLUMN} binary"


class WriteTask:
    """Writes the rows of one task; for `mapInArrow`.

    `grace_s` is how long a second attempt waits before it spoils the epoch: with speculation the first one
    may be alive, and is to win.
    """

    __slots__ = ("_grace_s", "_one_attempt", "_plan", "_tasks")

    def __init__(self, plan: WriterPlan, tasks: int, *, one_attempt: bool, grace_s: float) -> None:
        self._plan = plan
        self._tasks = tasks
        self._one_attempt = one_attempt
        self._grace_s = grace_s

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row: the pickled receipt or error."""
        settle()
        context = TaskContext.get()
        assert context is not None
        is_refused = self._one_attempt and context.attemptNumber() > 0
        outcome = self._refuse(context, batches) if is_refused else self._write(context, batches)
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(outcome)], pa.binary())], [OUTCOME_COLUMN])

    def _write(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> Receipt | SinkError:
        attempt = f"{context.stageId()}.{context.taskAttemptId()}"
        with BlockingWriter(self._plan.writer(context.partitionId(), attempt, tasks=self._tasks)) as writer:
            try:
                for batch in batches:
                    with _as_failed_writes():
                        writer.write(batch)
                with _as_failed_writes():
                    return writer.finish()
            except SinkError as error:
                return error

    def _refuse(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> WriteFailed:
        for _ in batches:
            pass
        time.sleep(self._grace_s)
        return WriteFailed(
            f"task {context.partitionId()} was tried again (attempt {context.attemptNumber()}), and its "
            "first attempt may have written: the epoch is run again as a whole"
        )


@contextmanager
def _as_failed_writes() -> Iterator[None]:
    """Whatever a writer raises is an error of the sink. What its input raises is not."""
    try:
        yield
    except SinkError:
        raise
    except Exception as error:
        where = "".join(traceback.format_exception(error))
        raise WriteFailed(f"a writer failed unexpectedly:\n{where}") from None
