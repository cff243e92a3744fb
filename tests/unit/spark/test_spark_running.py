"""One life of a pipeline without a Spark: what it starts it stops, and which of its ends are final."""

import asyncio
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from semel.client.errors import UnreachableError, broker_error
from semel.errors import ConfigError, SemelError
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import (
    CommitFailed,
    ConnectionLost,
    FencedOut,
    InitFailed,
    MarkerMismatch,
    UnknownOutcome,
    WriteFailed,
)
from semel.sinks.kafka import KafkaSink
from semel.sinks.marker import NO_MARKER, Marker, Owner, Start
from semel.sinks.metrics import SinkMetrics
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.sink_row import SinkRow
from semel.sinks.tracker import EpochTracker
from semel.spark import running
from semel.spark.epochs import EpochRunner
from semel.spark.pipeline import ExactlyOnce
from semel.spark.query import PipelineQuery
from semel.spark.running import is_final, run_all
from semel.wire.errors import ErrorCode

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
from memory_sink import MemorySink, MemoryTarget, failing


class FakeQuery:
    """Reads its input in no time, or ends with an error; and so may its stop."""

    lastProgress = None  # noqa: N815 - PySpark's name
    isActive = False  # noqa: N815
    rows = batches = skipped = 0

    def __init__(self, name: str, end: Exception | None = None, stop: Exception | None = None) -> None:
        self.name = name
        self.sinks = [SimpleNamespace(tracker=EpochTracker(), metrics=SinkMetrics())]
        self.is_stopped = False
        self._end = end
        self._stop = stop

    def awaitTermination(self, timeout: float) -> bool:
        if self._end is not None:
            raise self._end
        return True

    def stop(self) -> None:
        self.is_stopped = True
        if self._stop is not None:
            raise self._stop


def start_of(query: FakeQuery) -> Any:
    return SimpleNamespace(start=lambda trigger: query)


def no_start(error: Exception) -> Any:
    def start(trigger: str | None) -> None:
        raise error

    return SimpleNamespace(start=start)


def nobody_asks(is_asked: bool = False) -> Any:
    return SimpleNamespace(is_asked=is_asked)


def test_when_a_pipeline_does_not_start_those_before_it_are_stopped() -> None:
    first, second = FakeQuery("first"), FakeQuery("second")
    wrong = ConfigError("no such column")
    with pytest.raises(ConfigError, match="no such column"):
        run_all([start_of(first), start_of(second), no_start(wrong)], None, None, nobody_asks())
    assert first.is_stopped
    assert second.is_stopped


def test_a_stop_that_fails_does_not_keep_the_others_from_being_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = FakeQuery("first", stop=RuntimeError("Py4J is gone")), FakeQuery("second")
    assert run_all([start_of(first), start_of(second)], None, None, nobody_asks(is_asked=True)) == 1
    assert second.is_stopped
    assert "'first' was not stopped: Py4J is gone" in caplog.text


def test_why_a_pipeline_ended_is_told_and_not_that_its_stop_failed() -> None:
    first = FakeQuery("first", end=FencedOut("by another"), stop=RuntimeError("Py4J is gone"))
    with pytest.raises(FencedOut, match="by another"):
        run_all([start_of(first)], None, None, nobody_asks())


def test_pipelines_that_have_read_their_input_are_told_of_and_end_well() -> None:
    out = io.StringIO()
    assert run_all([start_of(FakeQuery("a")), start_of(FakeQuery("b"))], None, out, nobody_asks()) == 0
    assert out.getvalue().count('"pipeline":"a"') == out.getvalue().count('"pipeline":"b"') == 2


# The sinks of one pipeline


class StubbornSink(MemorySink):
    """Whose close fails, with whatever its driver raises."""

    async def _close(self) -> None:
        await super()._close()
        raise OSError("the network is down")


def test_when_a_sink_cannot_be_opened_all_others_are_closed_though_one_close_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    targets = [MemoryTarget(), MemoryTarget(), failing("open", InitFailed("no such table"))]
    sinks = [StubbornSink(targets[0]), MemorySink(targets[1]), MemorySink(targets[2])]
    pipeline = ExactlyOnce(fake_frame(), sinks, [[], [], []], "p", "ck", "append")
    with pytest.raises(InitFailed, match="no such table"):
        pipeline._open_sinks("127.0.0.1", FRESH)
    assert [target.calls[-1] for target in targets[:2]] == ["close", "close"]
    assert "a sink of 'p' was not closed: the network is down" in caplog.text


def checkpoint_at(batch: int, query_id: str = "a query", *, is_planned: bool = True) -> Any:
    return SimpleNamespace(query_id=lambda: query_id, start=lambda: Start(batch, query_id, is_planned))


FRESH: Any = checkpoint_at(0, "", is_planned=False)


def test_nobody_is_fenced_by_a_pipeline_whose_checkpoint_does_not_fit_the_marker() -> None:
    target = MemoryTarget()
    target.marker = Marker(4, "a query", "its offsets")
    pipeline = ExactlyOnce(fake_frame(), [MemorySink(target)], [[]], "p", "ck", "append")
    with pytest.raises(MarkerMismatch, match="wiped"):
        pipeline._open_sinks("127.0.0.1", FRESH)
    assert "open" not in target.calls, "whoever has the sink was fenced for nothing"
    for batch in (4, 5):  # in the target, and next
        (opened,) = pipeline._open_sinks("127.0.0.1", checkpoint_at(batch))
        opened.close()


def test_a_driver_that_commits_until_it_is_fenced_is_not_taken_for_a_checkpoint_rolled_back() -> None:
    target = MemoryTarget()
    target.marker = Marker(4, "a query", "its offsets")
    planned = 5

    class Sink(MemorySink):
        async def _open(self, owner: Owner) -> Marker:
            nonlocal planned
            target.marker, planned = Marker(6, "a query", "other offsets"), 7
            return await super()._open(owner)

    living: Any = SimpleNamespace(
        query_id=lambda: "a query", start=lambda: Start(planned, "a query", is_planned=True)
    )
    (opened,) = ExactlyOnce(fake_frame(), [Sink(target)], [[]], "p", "ck", "append")._open_sinks(
        "127.0.0.1", living
    )
    opened.close()


def test_a_checkpoint_behind_the_marker_is_refused_and_the_sink_closed() -> None:
    target = MemoryTarget()
    target.marker = Marker(4, "a query", "its offsets")
    pipeline = ExactlyOnce(fake_frame(), [MemorySink(target)], [[]], "p", "ck", "append")
    with pytest.raises(MarkerMismatch, match="rolled back"):
        pipeline._open_sinks("127.0.0.1", checkpoint_at(3))
    assert target.calls == ["open", "close"]


def fake_frame() -> Any:
    return SimpleNamespace(writeStream=None, sparkSession=SimpleNamespace(sparkContext=None))


def test_no_sink_is_opened_where_the_checkpoint_cannot_be_looked_at() -> None:
    target = MemoryTarget()
    frame = MagicMock()
    frame.sparkSession.streams.active = []
    frame._jdf.queryExecution().analyzed().collectLeaves().iterator().hasNext.return_value = False
    frame.sparkSession.sparkContext._jvm.org.apache.hadoop.fs.Path.side_effect = OSError("no file system")
    pipeline = ExactlyOnce(frame, [MemorySink(target)], [[]], "p", "ck", "append")
    with pytest.raises(OSError, match="no file system"):
        pipeline.start()
    assert target.calls == []


def test_a_query_has_ended_though_its_sinks_could_not_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    target = MemoryTarget()
    sink = BlockingSink(StubbornSink(target))
    sink.open("p")
    nothing: Any = None
    runner = EpochRunner("p", [sink], [[]], nothing, None, has_python=False)
    ended: Any = SimpleNamespace(awaitTermination=lambda: True)
    assert PipelineQuery(ended, runner).awaitTermination(timeout=60)
    assert target.calls[-1] == "close"
    assert "a sink of 'p' was not closed: the network is down" in caplog.text


# Which ends are final


def failure_of(sink: TransactionalSink) -> SemelError:
    """What `open` raises."""
    with pytest.raises(SemelError) as raised:
        asyncio.run(sink.open("p"))
    return raised.value


def met_by_kafka(error: Exception) -> SemelError:
    async def take(owner: Owner) -> NoReturn:
        raise error

    sink = KafkaSink("127.0.0.1:1", "out")
    sink._take = take  # type: ignore[method-assign]
    return failure_of(sink)


def refused_by_broker(code: ErrorCode) -> SemelError:
    return met_by_kafka(broker_error(code, "so"))


def refused_by_database(cause: Cause) -> SemelError:
    async def connect(label: str) -> NoReturn:
        raise SqlFailure("so", cause)

    sink = PostgresSink("dbname=nowhere", "t")
    sink._dialect = SimpleNamespace(connect=connect)  # type: ignore[assignment]
    return failure_of(sink)


FINAL: dict[str, Callable[[], SemelError]] = {
    "a wrong setting": lambda: ConfigError("so"),
    "a marker that does not fit": lambda: MarkerMismatch("so"),
    "another owner": lambda: FencedOut("so"),
    "no such topic": lambda: refused_by_broker(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    "too long a timeout": lambda: refused_by_broker(ErrorCode.INVALID_TRANSACTION_TIMEOUT),
    "no rights": lambda: refused_by_broker(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
    "a certificate that is not trusted": lambda: met_by_kafka(ConfigError("so")),
    "no such table": lambda: InitFailed("there is no table 'nowhere'"),
    "no such database": lambda: refused_by_database(Cause.MISSING),
    "a wrong password": lambda: refused_by_database(Cause.DENIED),
    "a row that cannot be written": lambda: WriteFailed("so", is_permanent=True),
    "a constraint that is looked at in the end": lambda: CommitFailed("so", is_permanent=True),
}
PASSING: dict[str, Callable[[], SemelError]] = {
    "a broker that is away": lambda: met_by_kafka(UnreachableError("nobody listens")),
    "a coordinator that loads": lambda: refused_by_broker(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
    "a broker with a fault": lambda: refused_by_broker(ErrorCode.UNKNOWN_SERVER_ERROR),
    "a port that is taken": lambda: met_by_kafka(OSError("in use")),
    "a database that is away": lambda: ConnectionLost("so"),
    "a lock": lambda: refused_by_database(Cause.LOCKED),
    "a deadlock": lambda: refused_by_database(Cause.CONFLICT),
    "rows that were not taken this time": lambda: WriteFailed("so"),
    "a commit that was not taken this time": lambda: CommitFailed("so"),
    "no answer": lambda: UnknownOutcome("so"),
}


@pytest.mark.parametrize("make", FINAL.values(), ids=FINAL.keys())
def test_what_another_start_would_meet_again_is_final(make: Callable[[], SemelError]) -> None:
    assert is_final(make())


@pytest.mark.parametrize("make", PASSING.values(), ids=PASSING.keys())
def test_what_may_go_right_the_next_time_is_not_final(make: Callable[[], SemelError]) -> None:
    assert not is_final(make())


@pytest.mark.parametrize(
    "sink",
    [PostgresSink("host=127.0.0.1 port=1 dbname=x", "t"), MySQLSink("mysql://x:y@127.0.0.1:1/x", "t")],
    ids=["PostgreSQL", "MySQL"],
)
async def test_a_database_that_nobody_answers_for_may_be_back_the_next_time(sink: SqlSink) -> None:
    with pytest.raises(ConnectionLost) as raised:
        await sink.open("p")
    assert not is_final(raised.value)


async def test_a_sink_whose_row_somebody_has_locked_may_be_free_the_next_time() -> None:
    sink = PostgresSink("dbname=nowhere", "t")
    row = SinkRow("p", 0, None, NO_MARKER)
    sink._rows = LockedRows(row)  # type: ignore[assignment]

    async def set_lock_timeout(seconds: float) -> None:
        pass

    session: Any = SimpleNamespace(set_lock_timeout=set_lock_timeout, session_id=1)
    with pytest.raises(InitFailed, match="locked") as raised:
        await sink._take(session, row)
    assert not is_final(raised.value)


class LockedRows:
    def __init__(self, row: SinkRow) -> None:
        self._row = row

    async def read(self, session: object, sink_id: str) -> SinkRow:
        return self._row

    async def take(self, *given: object) -> bool:
        raise SqlFailure("could not obtain lock", Cause.LOCKED)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For a pipeline that raises what the test says; there is no session."""
    monkeypatch.setattr(running, "local_session", lambda *given, **settings: MagicMock())
    return tmp_path / "pipeline.py"


@pytest.mark.parametrize("kind", [ConfigError, MarkerMismatch, FencedOut, InitFailed])
def test_a_final_end_is_told_in_a_line_and_by_the_exit_code(
    file: Path, kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"from {kind.__module__} import *\ndef pipeline(spark): raise {kind.__name__}('so')\n")
    assert running.main([str(file)]) == running.FINAL_EXIT
    assert capsys.readouterr().err == f"{kind.__name__}: so\n"


def test_an_end_that_may_pass_is_told_in_a_line_and_is_a_crash(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(
        "from semel.sinks.errors import ConnectionLost\ndef pipeline(spark): raise ConnectionLost('so')\n"
    )
    assert running.main([str(file)]) == running.FAILED_EXIT
    assert capsys.readouterr().err == "ConnectionLost: so\n"


def test_an_error_of_the_users_code_is_a_crash_and_keeps_its_trace(file: Path) -> None:
    file.write_text("def pipeline(spark): raise ValueError('so')\n")
    with pytest.raises(ValueError, match="so"):
        running.main([str(file)])


MISTAKES = {
    "def pipeline(spark) return 3": r"cannot be read: SyntaxError: .*pipeline.py, line 1",
    "nothing = None": r"pipeline.py has no function pipeline\(spark\)",
    "import semel.nothing": r"pipeline.py, line 1: ModuleNotFoundError: No module named 'semel.nothing'",
    "import semel\ndef pipeline(spark):\n  return semel.spark.raed()": r"line 3: AttributeError: .*'raed'",
    "import semel\ndef pipeline(spark):\n  semel.spark.exactly_once(1, 2)": r"line 3: TypeError: .*'name'",
    "def pipeline(spark): return 3": r"must return what exactly_once made",
    "def pipeline(spark): return [3]": r"must return what exactly_once made",
}


@pytest.mark.parametrize(("text", "told"), MISTAKES.items())
def test_a_mistake_in_the_file_is_told_with_its_line_and_is_final(
    file: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert running.main([str(file)]) == running.FINAL_EXIT
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(told, err), err


def test_a_pipeline_that_has_lost_its_supervisor_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tell_nobody(*given: object) -> NoReturn:
        raise BrokenPipeError

    file.write_text("")
    monkeypatch.setattr(running, "run", tell_nobody)
    assert running.main([str(file)]) == running.FAILED_EXIT
    assert "`semel run` is gone" in caplog.text
