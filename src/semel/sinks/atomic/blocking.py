"""The same transactions for programs without an event loop, from any number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from psycopg import sql

from semel.client.loop_thread import LoopThread
from semel.sinks.atomic.database import Result
from semel.wire.records import Headers

if TYPE_CHECKING:
    from semel.sinks.atomic.atomic import Atomic, AtomicTransaction


class BlockingTransaction:
    """One transaction: statements and records that come to be together."""

    def __init__(self, transaction: "AtomicTransaction", thread: LoopThread) -> None:
        self._transaction = transaction
        self._thread = thread

    def execute(self, query: str | bytes | sql.Composable, params: object = None) -> Result:
        return self._thread.run(self._transaction.execute(query, params))

    def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> None:
        self._thread.run(
            self._transaction.publish(
                topic, value, key=key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
            )
        )


class BlockingAtomic:
    """What `with semel.transaction(…)` gives: the methods of `Atomic`, without `await`."""

    def __init__(self, atomic: "Atomic") -> None:
        self.atomic = atomic
        self._thread = LoopThread("semel atomic")

    def __enter__(self) -> Self:
        try:
            self._thread.run(self.atomic.open())
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def begin(self) -> Iterator[BlockingTransaction]:
        """As `Atomic.begin`."""
        block = self.atomic.begin()
        transaction = self._thread.run(block.__aenter__())
        try:
            yield BlockingTransaction(transaction, self._thread)
        except BaseException as error:
            self._thread.run(block.__aexit__(type(error), error, error.__traceback__))
            raise
        self._thread.run(block.__aexit__(None, None, None))

    def close(self) -> None:
        try:
            self._thread.run(self.atomic.close())
        finally:
            self._thread.close()
