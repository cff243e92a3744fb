"""The same sinks for programs without an event loop: each call runs on a loop in a thread of its own."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from semel.client.loop_thread import LoopThread
from semel.sinks.receipts import NO_ORIGIN, Origin, Receipt
from semel.sinks.sink import Rows, TransactionalSink, Writer, WriterPlan
from semel.sinks.source_group import SourceOffsets


class BlockingWriter:
    """A writer for a task that is plain code. As a context manager it cancels what was not finished."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._thread = LoopThread("semel writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def write(self, rows: Rows) -> None:
        """Takes rows, in order; they reach the target at the latest with `finish`."""
        self._thread.run(self._writer.write(rows))

    def finish(self) -> Receipt:
        """Waits until the target has acknowledged all rows; the receipt is for the owner's `commit`."""
        return self._thread.run(self._writer.finish())

    def cancel(self) -> None:
        """As of the writer. Idempotent."""
        if self._thread.is_closed:
            return
        try:
            self._thread.run(self._writer.cancel())
        finally:
            self._thread.close()


class BlockingSink:
    """A sink for a program that is plain code: the methods of `TransactionalSink`, without `await`."""

    def __init__(self, sink: TransactionalSink) -> None:
        self.sink = sink
        self._thread = LoopThread("semel sink")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, sink_id: str, query_id: str | None = None) -> int | None:
        """Takes the sink: fences earlier owners, aborts what they left; returns the last committed epoch."""
        return self._thread.run(self.sink.open(sink_id, query_id))

    def begin(self, epoch: int, origin: Origin = NO_ORIGIN) -> WriterPlan | None:
        """Begins an epoch; None if it is committed already, and then nothing is to be done."""
        return self._thread.run(self.sink.begin(epoch, origin))

    def writer(self, task: int = 0, attempt: str = "0", *, tasks: int = 1) -> BlockingWriter:
        """A writer in this process for the present epoch."""
        return BlockingWriter(self.sink.writer(task, attempt, tasks=tasks))

    def commit(
        self, epoch: int, receipts: Iterable[Receipt], source_offsets: SourceOffsets | None = None
    ) -> None:
        """Makes the epoch visible, with its marker, in one step."""
        self._thread.run(self.sink.commit(epoch, receipts, source_offsets))

    def abort(self, epoch: int, reason: str = "") -> None:
        """Drops the epoch: none of it was or will be visible. Then the same epoch may be begun again."""
        self._thread.run(self.sink.abort(epoch, reason))

    def close(self) -> None:
        """As of the sink; a call that is under way in another thread raises an error first. Idempotent."""
        if self._thread.is_closed:
            return
        try:
            self._thread.interrupt()
            self._thread.run(self.sink.close())
        finally:
            self._thread.close()
