"""The same sinks without an event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory_sink import MemorySink, MemoryTarget, failing

from semel.client.loop_thread import LoopThread
from semel.errors import SemelError
from semel.sinks.blocking import BlockingSink, BlockingWriter
from semel.sinks.errors import WriteFailed
from semel.sinks.receipts import Place
from semel.sinks.sink import State


def test_an_epoch_runs_without_await() -> None:
    target = MemoryTarget()
    with BlockingSink(MemorySink(target)) as sink:
        assert sink.open("sink") is None
        assert sink.begin(0) is not None
        with sink.writer() as writer:
            writer.write([{"row": 1}])
            receipt = writer.finish()
        sink.commit(0, [receipt])
        assert sink.begin(0) is None
        sink.begin(1)
        sink.abort(1)
    assert target.rows == [{"row": 1}]
    assert sink.sink.state is State.CLOSED
    assert target.calls[-1] == "close"


def test_a_writer_that_fails_is_cancelled_by_its_context() -> None:
    target = failing("write", WriteFailed("no"))
    with BlockingSink(MemorySink(target)) as sink:
        sink.open("sink")
        sink.begin(0)
        with pytest.raises(WriteFailed), sink.writer() as writer:
            writer.write([{"row": 1}])
    assert target.calls.count("cancel") == 1


def test_a_writer_may_be_cancelled_again() -> None:
    target = MemoryTarget()
    with BlockingSink(MemorySink(target)) as sink:
        sink.open("sink")
        sink.begin(0)
        with sink.writer() as writer:
            writer.cancel()
    assert target.calls.count("cancel") == 1


class StuckSink(MemorySink):
    """Whose target never answers a commit."""

    def __init__(self, target: MemoryTarget) -> None:
        super().__init__(target)
        self.is_committing = threading.Event()

    async def _commit(self, *given: object) -> None:
        self.is_committing.set()
        await asyncio.Event().wait()


def test_a_commit_ends_when_the_sink_is_closed_from_elsewhere() -> None:
    """As where the JVM of a pipeline dies."""
    stuck = StuckSink(MemoryTarget())
    sink = BlockingSink(stuck)
    sink.open("sink")
    sink.begin(0)
    with sink.writer() as writer:
        receipt = writer.finish()
    with ThreadPoolExecutor(1) as callback:
        committing = callback.submit(sink.commit, 0, [receipt])
        assert stuck.is_committing.wait(30)
        sink.close()
        with pytest.raises(SemelError, match="semel sink was closed before this came to its end"):
            committing.result(30)
    assert stuck.state is State.CLOSED
    sink.close()


def test_a_plan_makes_blocking_writers_elsewhere() -> None:
    with BlockingSink(MemorySink(MemoryTarget())) as sink:
        sink.open("sink")
        plan = sink.begin(0)
        assert plan is not None
        with BlockingWriter(plan.writer(3, "1", tasks=4)) as writer:
            receipt = writer.finish()
        assert (receipt.place, receipt.task, receipt.attempt) == (Place(sink.sink.run, 0, 1), 3, "1")


def test_work_runs_in_a_thread_that_ends() -> None:
    thread = LoopThread("a test")

    async def name() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert thread.run(name()) == "a test"
    thread.close()
    thread.close()
    assert "a test" not in [each.name for each in threading.enumerate()]
