"""One micro-batch as one epoch, on the driver: begin, run the tasks, commit; or abort and run it again.

The rule that everything rests on: `run` returns only if the marker of every sink says that the batch is
committed. Spark writes its commit log after that. The whole story, with every place where something may die,
is in docs/design/spark_epoch.md.
"""

import logging
import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from semel.errors import SemelError
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import CommitFailed, ConnectionLost, FencedOut, SinkError, WriteFailed
from semel.sinks.receipts import Origin, Receipt
from semel.sinks.sink import WriterPlan
from semel.sinks.source_group import SourceOffsets
from semel.sinks.tasks import OUTCOME_SCHEMA, WriteTask
from semel.spark.checkpoint import Checkpoint
from semel.spark.columns import select_columns
from semel.spark.shares import share_out
from semel.spark.source_cluster import SourceCluster
from semel.spark.transfer import Transfer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 6
# Doubled from one attempt to the next: up to 8 seconds before the last.
FIRST_BACKOFF_S: Final = 0.5
# How long a copy of a task waits for its original, where Spark speculates.
FIRST_GRACE_S: Final = 5.0
# How Spark says that a job failed for what it lost, and not for what the user's code did. The first is of
# queries with state: rows come from a shuffle in any order, so Spark does not make a part of them anew.
LOST_WORK: Final = (
    "indeterminate output was failed and retried",
    "has failed the maximum allowable number of times",
    "ExecutorLostFailure",
)
QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"


class StoppedError(SemelError):
    """The query was stopped in the middle of a batch, which is run again by the next start."""


class Outlet(NamedTuple):
    """One sink, the columns that go there, and how their rows travel to its tasks."""

    sink: BlockingSink
    columns: list[str]
    transfer: Transfer


class Epoch(NamedTuple):
    """A batch as sinks know it: its number, what it is made from, and how far that reads the source."""

    number: int
    origin: Origin
    source: SourceOffsets | None


class EpochRunner:
    """The callback of `foreachBatch`, with the sinks that it owns."""

    def __init__(
        self,
        name: str,
        sinks: Sequence[BlockingSink],
        columns: Sequence[list[str]],
        checkpoint: Checkpoint,
        source: SourceCluster | None,
        *,
        has_python: bool,
    ) -> None:
        self.name = name
        self.sinks = sinks
        self.failure: BaseException | None = None
        self.attempts = 0
        self.skipped = 0
        self.batches = 0
        self.rows = 0
        self._checkpoint = checkpoint
        self._source = source
        self._outlets = [
            Outlet(sink, names, Transfer(has_python=has_python))
            for sink, names in zip(sinks, columns, strict=True)
        ]
        self._stopping = threading.Event()
        self._closing = threading.Lock()
        self._open = list(sinks)

    def stop(self) -> None:
        """A batch that is under way is not tried again."""
        self._stopping.set()

    def run(self, batch: "DataFrame", batch_id: int) -> None:
        """Returns once every sink has the batch; raises otherwise, and then Spark ends the query."""
        try:
            self._run(batch, batch_id)
        except BaseException as error:
            self.failure = error
            self.close()
            if self._stopping.is_set():
                # The error of a cancelled job is long, and Spark looks through it with a pattern that
                # overflows its stack.
                raise StoppedError(f"{self.name!r} was stopped in batch {batch_id}") from None
            raise

    def close(self) -> None:
        """Closes the sinks, which aborts what is active. Idempotent."""
        with self._closing:
            closing, self._open = self._open, []
            close_all(self.name, closing)

    def _run(self, batch: "DataFrame", batch_id: int) -> None:
        offsets = self._checkpoint.offsets(batch_id)
        origin = Origin(_query_id(batch), offsets.digest)
        epoch = Epoch(batch_id, origin, self._source_offsets(offsets.by_topic()))
        # All are asked before one of them writes.
        plans = [self._begin(outlet.sink, epoch) for outlet in self._outlets]
        pending = [
            (outlet, plan) for outlet, plan in zip(self._outlets, plans, strict=True) if plan is not None
        ]
        if not pending:
            self._skip(batch, batch_id)
            return
        with computed_once(batch) if len(pending) > 1 else nullcontext(batch) as rows_of_batch:
            rows = [self._write(rows_of_batch, epoch, outlet, plan) for outlet, plan in pending]
        # A row counts once, however many sinks it goes to, and when the last of them has it.
        self.batches += 1
        self.rows += max(rows)

    def _skip(self, batch: "DataFrame", batch_id: int) -> None:
        log.info("batch %d of %r is committed already: its rows are there", batch_id, self.name)
        self.skipped += 1
        if self._checkpoint.has_state():
            # State must go on to the next version; what the batch would write is in the targets.
            batch.write.format("noop").mode("append").save()

    def _source_offsets(self, offsets: dict[str, dict[int, int]]) -> SourceOffsets | None:
        if self._source is None or not offsets:
            return None
        return SourceOffsets(self._source.bootstrap, offsets, self._source.connection)

    # One sink

    def _begin(self, sink: BlockingSink, epoch: Epoch) -> WriterPlan | None:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return sink.begin(epoch.number, epoch.origin)
            except ConnectionLost as error:
                _require_another_attempt(error, attempt)
                self._back_off(error, attempt, epoch)
        raise AssertionError("the last attempt raises")

    def _write(self, batch: "DataFrame", epoch: Epoch, outlet: Outlet, plan: WriterPlan) -> int:
        """How many rows there were."""
        sink, rows = outlet.sink, select_columns(batch, outlet.columns)
        for attempt in range(MAX_ATTEMPTS):
            self.attempts += 1
            try:
                receipts = _receipts(rows, plan, attempt, outlet.transfer)
                sink.commit(epoch.number, receipts, epoch.source)
                return sum(receipt.rows for receipt in receipts)
            except (WriteFailed, CommitFailed, ConnectionLost) as error:
                _require_another_attempt(error, attempt)
                # Only if the abort is accepted is it certain that no one has replaced us. Before the wait, in
                # which what is open would hold up readers and whoever needs its locks.
                sink.abort(epoch.number, str(error))
                self._back_off(error, attempt, epoch)
            again = self._begin(sink, epoch)
            assert again is not None, "an epoch that was aborted is committed"
            plan = again
        raise AssertionError("the last attempt raises")

    def _back_off(self, error: SinkError, attempt: int, epoch: Epoch) -> None:
        log.warning("batch %d of %r is run again: %s", epoch.number, self.name, error)
        if self._stopping.wait(FIRST_BACKOFF_S * 2**attempt):
            raise error


@contextmanager
def computed_once(batch: "DataFrame") -> Iterator["DataFrame"]:
    """The batch, as it is kept for several sinks."""
    kept = batch.persist()
    try:
        yield kept
    finally:
        try:
            kept.unpersist()
        except Exception as error:  # where the session ends, too: why the batch ended is what is to be told
            log.warning("a batch was not let go of: %s", error)


def close_all(name: str, sinks: Iterable[BlockingSink]) -> None:
    """Each of them, though one may fail: why a pipeline ended, or did not begin, is what is to be told."""
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:
            log.warning("a sink of %r was not closed: %s", name, error)


def _require_another_attempt(error: SinkError, attempt: int) -> None:
    is_permanent = isinstance(error, WriteFailed | CommitFailed) and error.is_permanent
    if is_permanent or attempt + 1 == MAX_ATTEMPTS:
        raise error


def _receipts(batch: "DataFrame", plan: WriterPlan, attempt: int, transfer: Transfer) -> list[Receipt]:
    """Runs the tasks: the one evaluation of the batch in this attempt."""
    shares = share_out(batch, plan)
    task = WriteTask(plan, shares.tasks, one_attempt=shares.one_attempt, grace_s=_grace_s(batch, attempt))
    with transfer.prepared(shares.rows) as rows:
        outcomes = _run_tasks(rows.mapInArrow(task.run, OUTCOME_SCHEMA))
    errors = [outcome for outcome in outcomes if isinstance(outcome, SinkError)]
    if errors:
        # What one task has met, others only hear of: that the epoch is spoiled.
        raise next((each for each in errors if _is_final(each)), errors[0])
    return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]


def _run_tasks(tasks: "DataFrame") -> list[Receipt | SinkError]:
    try:
        rows = tasks.collect()
    except Exception as error:
        lost = [line for line in str(error).splitlines() if any(sign in line for sign in LOST_WORK)]
        if not lost:
            raise
        raise WriteFailed(f"Spark lost what tasks had done, and gave the job up: {lost[0]}") from error
    return [pickle.loads(row[0]) for row in rows]


def _is_final(error: SinkError) -> bool:
    return isinstance(error, FencedOut) or (isinstance(error, WriteFailed) and error.is_permanent)


def _grace_s(batch: "DataFrame", attempt: int) -> float:
    speculates = batch.sparkSession.conf.get("spark.speculation", "false")
    return FIRST_GRACE_S * 2.0**attempt if str(speculates).lower() == "true" else 0.0


def _query_id(batch: "DataFrame") -> str:
    found: Any = batch.sparkSession.sparkContext.getLocalProperty(QUERY_ID_PROPERTY)
    if not found:
        raise SemelError(
            f"Spark did not say which query this batch is of ({QUERY_ID_PROPERTY}): is PYSPARK_PIN_THREAD "
            "off?"
        )
    return str(found)
