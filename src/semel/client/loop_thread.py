"""An event loop in a thread of its own, for programs that have none.

Whoever waits for a call is answered: one that is interrupted (Ctrl-C) when its work has cleaned up behind
itself, and those whose calls are under way when the thread is closed with an error. Work that exits
(SystemExit) does so where it is waited for: the thread goes on.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final, TypeVar

from semel.errors import SemelError

T = TypeVar("T")

# For work that is cancelled to clean up behind itself. What takes longer is left.
CLEAN_UP_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 40.0
# A task that raises one of them keeps it as its outcome, and asyncio lets it out of the loop as well.
EXITS: Final = (SystemExit, KeyboardInterrupt)


async def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Waits for work that belongs to that loop, which may run in another thread, or be the caller's own."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class LoopThread:
    """An event loop in a daemon thread. `run` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # What is under way for whom; of the loop's thread alone.
        self._calls: dict[Future[Any], asyncio.Task[Any]] = {}
        # Nothing is begun after the loop was told to stop: nobody would end it.
        self._closing = threading.Lock()
        self._is_closed = False
        self._is_stopping = False  # of the loop's thread alone
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the work. An interrupt of the caller cancels it, and is raised when it has ended."""
        outcome: Future[T] = Future()
        try:
            self._hand_over(work, outcome)
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self._cancel(outcome)
                wait([outcome], CLEAN_UP_TIMEOUT_S)
            raise

    def interrupt(self) -> None:
        """Ends all calls that are under way in other threads: they raise SemelError."""
        self.run(self._interrupt())

    def close(self) -> None:
        """Ends the thread, and whatever is under way in it. Idempotent."""
        with self._closing:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._stop)
            self._is_closed = True
        self._thread.join(JOIN_TIMEOUT_S)

    def _hand_over(self, work: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
        with self._closing:
            if self._is_closed:
                work.close()
                outcome.set_exception(self._gone())
            else:
                self._loop.call_soon_threadsafe(self._begin, work, outcome)

    def _cancel(self, outcome: Future[Any]) -> None:
        with self._closing:
            if not self._is_closed:  # else it is seen to
                self._loop.call_soon_threadsafe(self._cut, outcome)

    # In the loop's thread

    def _live(self) -> None:
        while not self._is_stopping:
            with suppress(*EXITS):
                self._loop.run_forever()
        ending = self._loop.create_task(_end(asyncio.all_tasks(self._loop)))
        while not ending.done():
            with suppress(*EXITS):
                self._loop.run_until_complete(ending)
        self._loop.close()
        for outcome in self._calls:
            outcome.set_exception(self._gone())

    def _stop(self) -> None:
        self._is_stopping = True
        self._loop.stop()

    def _begin(self, work: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
        task = self._loop.create_task(work)
        self._calls[outcome] = task
        task.add_done_callback(lambda ended: self._answer(outcome, ended))

    def _answer(self, outcome: Future[T], task: asyncio.Task[T]) -> None:
        del self._calls[outcome]
        if task.cancelled():
            outcome.set_exception(self._gone())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def _cut(self, outcome: Future[Any]) -> None:
        if (task := self._calls.get(outcome)) is not None:
            task.cancel()
        elif not outcome.done():
            outcome.cancel()  # it was interrupted before it was handed over

    async def _interrupt(self) -> None:
        await _end(task for task in self._calls.values() if task is not asyncio.current_task())

    def _gone(self) -> SemelError:
        return SemelError(f"the {self._thread.name} was closed before this came to its end")


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them, and waits until they have cleaned up; not for ever."""
    cancelled = [task for task in tasks if task.cancel()]
    if cancelled:
        await asyncio.wait(cancelled, timeout=CLEAN_UP_TIMEOUT_S)
