"""What becomes of a batch that fails, and of a task whose writer does, without a Spark."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from semel.sinks import tasks
from semel.sinks.errors import BeginFailed, CommitFailed, ConnectionLost, SinkError, WriteFailed
from semel.sinks.receipts import Place, Receipt
from semel.sinks.sink import Rows, Writer, WriterPlan
from semel.sinks.tasks import WriteTask
from semel.spark import epochs
from semel.spark.epochs import EpochRunner

ONE_ROW = pa.RecordBatch.from_pydict({"value": ["v"]})
# Between six attempts.
WAITS_S = [0.5, 1, 2, 4, 8]


class Script:
    """A sink and the tasks before it, and what they are asked for, in order."""

    def __init__(self, *outcomes: Exception | None, begins: Sequence[Exception] = ()) -> None:
        self._outcomes = iter(outcomes)
        self._begins = iter(begins)
        self.calls: list[str] = []
        self.waits_s: list[float] = []

    # Of the sink

    def begin(self, epoch: int, origin: object) -> object:
        self.calls.append("begin")
        if (failure := next(self._begins, None)) is not None:
            raise failure
        return object()

    def commit(self, epoch: int, receipts: object, source_offsets: object) -> None:
        self.calls.append("commit")

    def abort(self, epoch: int, reason: str) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")

    # Of the runner

    def wait(self, seconds: float) -> bool:
        self.calls.append("wait")
        self.waits_s.append(seconds)
        return False

    def run_tasks(self, *_: object) -> list[Receipt]:
        if (failure := next(self._outcomes)) is not None:
            raise failure
        return []


@pytest.fixture
def run_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(script: Script) -> None:
        offsets = SimpleNamespace(digest="d", by_topic=dict)
        checkpoint: Any = SimpleNamespace(offsets=lambda batch_id: offsets)
        sink: Any = script
        runner = EpochRunner("p", [sink], [["value"]], checkpoint, None, has_python=False)
        runner._stopping.wait = script.wait  # type: ignore[method-assign]
        monkeypatch.setattr(epochs, "_receipts", script.run_tasks)
        monkeypatch.setattr(epochs, "_query_id", lambda batch: "q")
        monkeypatch.setattr(epochs, "select_columns", lambda batch, columns: batch)
        batch: Any = object()
        runner.run(batch, 0)

    return run


def test_a_spoiled_epoch_is_aborted_before_anyone_waits(run_batch: Any) -> None:
    """What is open holds up readers and whoever needs its locks."""
    script = Script(WriteFailed("lost"), WriteFailed("lost again"), None)
    run_batch(script)
    again = ["abort", "wait", "begin"]
    assert script.calls == ["begin", *again, *again, "commit"]


@pytest.mark.parametrize("kind", [WriteFailed, CommitFailed, ConnectionLost])
def test_an_epoch_that_is_spoiled_six_times_is_given_up_and_the_sink_closed(
    run_batch: Any, kind: type[SinkError]
) -> None:
    script = Script(*(kind(f"attempt {number}") for number in range(1, 8)))
    with pytest.raises(kind, match=r"^attempt 6$"):
        run_batch(script)
    again = ["abort", "wait", "begin"]
    assert script.calls == ["begin", *again * 5, "close"]
    assert script.waits_s == WAITS_S


def test_a_sink_that_cannot_be_reached_is_asked_six_times_and_then_closed(run_batch: Any) -> None:
    script = Script(begins=[ConnectionLost(f"attempt {number}") for number in range(1, 8)])
    with pytest.raises(ConnectionLost, match=r"^attempt 6$"):
        run_batch(script)
    assert script.calls == [*["begin", "wait"] * 5, "begin", "close"]
    assert script.waits_s == WAITS_S


def test_an_epoch_that_a_sink_refuses_to_begin_is_given_up_at_once(run_batch: Any) -> None:
    script = Script(begins=[BeginFailed("no rights")])
    with pytest.raises(BeginFailed, match="no rights"):
        run_batch(script)
    assert script.calls == ["begin", "close"]


def test_a_sink_that_is_reached_again_goes_on_with_the_batch(run_batch: Any) -> None:
    script = Script(None, begins=[ConnectionLost("away")])
    run_batch(script)
    assert script.calls == ["begin", "wait", "begin", "commit"]


def test_what_would_fail_again_is_not_tried_again(run_batch: Any) -> None:
    script = Script(WriteFailed("a row is too large", is_permanent=True))
    with pytest.raises(WriteFailed, match="too large"):
        run_batch(script)
    assert script.calls == ["begin", "close"]


class BrokenWriter(Writer):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _pass(self, where: str) -> None:
        if where == self._where:
            raise KeyError("so")

    async def write(self, rows: Rows) -> None:
        self._pass("write")

    async def finish(self) -> Receipt:
        self._pass("finish")
        return Receipt(Place("run", 0, 0), 0, "0", 0, 0)

    async def cancel(self) -> None:
        self._pass("cancel")


class BrokenPlan(WriterPlan):
    def __init__(self, where: str) -> None:
        self._where = where

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        return BrokenWriter(self._where)


def context(**numbers: int) -> SimpleNamespace:
    """What a task learns of itself; the first attempt of the first task, unless it is said otherwise."""
    names = ("attemptNumber", "stageId", "taskAttemptId", "partitionId")
    fields = {name: partial(numbers.get, name, 0) for name in names}
    return SimpleNamespace(get=lambda: SimpleNamespace(**fields))


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TaskContext", context())


def outcome_of(where: str, batches: Iterator[pa.RecordBatch]) -> Any:
    task = WriteTask(BrokenPlan(where), 1, one_attempt=True, grace_s=0.0)
    (outcome,) = task.run(batches)
    return pickle.loads(outcome.column(0)[0].as_py())


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("where", ["write", "finish"])
def test_a_defect_of_a_writer_is_shown_and_not_hidden_behind_another_try_at_its_task(where: str) -> None:
    outcome = outcome_of(where, iter([ONE_ROW]))
    assert isinstance(outcome, WriteFailed) and not outcome.is_permanent
    assert "KeyError: 'so'" in str(outcome)


@pytest.mark.usefixtures("in_a_task")
def test_a_task_leaves_no_thread_behind_however_its_writer_ends() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="so"):
        outcome_of("cancel", iter([ONE_ROW]))
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("in_a_task")
def test_an_error_of_the_users_code_stays_what_it_is() -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield ONE_ROW
        raise ZeroDivisionError("the user's")

    with pytest.raises(ZeroDivisionError):
        outcome_of("nowhere", rows())


# Attempts after the first


class Sleeps:
    """Time that only passes by: how long somebody slept, and what had happened until then."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def sleep(self, seconds: float) -> None:
        self._happened.append(f"slept {seconds:g} s")


class WatchedPlan(WriterPlan):
    """Says when a writer is made."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        self._happened.append("made a writer")
        return BrokenWriter("nowhere")


class SecondAttempt:
    """Of task 3, on a topic; `happened` is what it did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        monkeypatch.setattr(tasks, "TaskContext", context(attemptNumber=1, partitionId=3))
        monkeypatch.setattr(tasks, "time", Sleeps(self.happened))

    def rows(self, failure: Exception | None = None) -> Iterator[pa.RecordBatch]:
        for _ in range(2):
            yield ONE_ROW
        self.happened.append("read all rows")
        if failure is not None:
            raise failure

    def run(
        self, batches: Iterator[pa.RecordBatch], *, one_attempt: bool = True, grace_s: float = 0.0
    ) -> Any:
        task = WriteTask(WatchedPlan(self.happened), 4, one_attempt=one_attempt, grace_s=grace_s)
        (outcome,) = task.run(batches)
        return pickle.loads(outcome.column(0)[0].as_py())


@pytest.fixture
def second_attempt(monkeypatch: pytest.MonkeyPatch) -> SecondAttempt:
    return SecondAttempt(monkeypatch)


def test_a_second_attempt_at_a_task_writes_nothing_and_spoils_the_epoch_when_its_first_had_time_to_win(
    second_attempt: SecondAttempt,
) -> None:
    outcome = second_attempt.run(second_attempt.rows(), grace_s=20.0)
    assert isinstance(outcome, WriteFailed) and not outcome.is_permanent
    assert "task 3 was tried again (attempt 1)" in str(outcome)
    assert second_attempt.happened == ["read all rows", "slept 20 s"]


def test_an_error_of_the_users_code_is_met_again_by_a_second_attempt_and_is_what_it_tells(
    second_attempt: SecondAttempt,
) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's"):
        second_attempt.run(second_attempt.rows(ZeroDivisionError("the user's")), grace_s=20.0)
    assert second_attempt.happened == ["read all rows"]


def test_a_second_attempt_writes_anew_where_rows_are_staged(second_attempt: SecondAttempt) -> None:
    outcome = second_attempt.run(second_attempt.rows(), one_attempt=False, grace_s=20.0)
    assert isinstance(outcome, Receipt)
    assert second_attempt.happened == ["made a writer", "read all rows"]


@pytest.mark.parametrize(
    ("speculates", "graces_s"), [("true", [5, 10, 20]), ("false", [0, 0, 0]), (None, [0, 0, 0])]
)
def test_a_second_attempt_waits_where_spark_makes_copies_of_slow_tasks_and_longer_each_time(
    speculates: str | None, graces_s: list[float]
) -> None:
    settings = {} if speculates is None else {"spark.speculation": speculates}
    batch: Any = SimpleNamespace(sparkSession=SimpleNamespace(conf=settings))
    assert [epochs._grace_s(batch, attempt) for attempt in range(3)] == graces_s
