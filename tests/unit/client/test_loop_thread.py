"""An event loop in a thread: whoever waits for a call is answered."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from semel.client.loop_thread import LoopThread
from semel.errors import SemelError

TIMEOUT_S = 30


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test's thread")
    yield thread
    thread.close()


class Work:
    """Does not end by itself, and takes a while to clean up."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.is_clean = False

    async def do(self, interrupted: bool = False, exits: bool = False) -> None:
        self.has_begun.set()
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.is_clean = True
            if exits:
                sys.exit("enough")


def test_a_caller_that_is_interrupted_goes_on_when_its_work_has_cleaned_up(thread: LoopThread) -> None:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        thread.run(work.do(interrupted=True))
    assert work.is_clean


@pytest.mark.parametrize("end", [LoopThread.interrupt, LoopThread.close])
def test_calls_of_other_threads_are_ended_with_an_error(end: object, thread: LoopThread) -> None:
    assert callable(end)
    work = Work()
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(thread.run, work.do())
        assert work.has_begun.wait(TIMEOUT_S)
        end(thread)
        with pytest.raises(SemelError, match="the test's thread was closed before this came to its end"):
            waiting.result(TIMEOUT_S)
    assert work.is_clean


def test_what_work_has_left_behind_ends_with_the_thread(thread: LoopThread) -> None:
    work = Work()
    left: list[asyncio.Task[None]] = []

    async def leave() -> None:
        left.append(asyncio.create_task(work.do()))

    thread.run(leave())
    assert work.has_begun.wait(TIMEOUT_S)
    thread.close()
    assert work.is_clean


def test_an_interrupt_of_others_leaves_the_thread_to_be_used(thread: LoopThread) -> None:
    thread.interrupt()
    assert thread.run(asyncio.sleep(0, "done")) == "done"


def test_nothing_is_begun_when_it_is_closed(thread: LoopThread) -> None:
    thread.close()
    with pytest.raises(SemelError, match="closed"):
        thread.run(asyncio.sleep(0))


@pytest.mark.parametrize("way_out", [SystemExit, KeyboardInterrupt])
def test_work_that_exits_does_so_where_it_is_waited_for(
    way_out: type[BaseException], thread: LoopThread
) -> None:
    """A loop lets that pass, and would end with its thread, whoever waits."""

    async def leave() -> None:
        raise way_out("enough")

    async def leave_a_task() -> None:
        await asyncio.create_task(leave())

    with ThreadPoolExecutor(1) as others:
        for work in (leave(), leave_a_task()):
            with pytest.raises(way_out, match="enough"):
                others.submit(thread.run, work).result(TIMEOUT_S)
        assert others.submit(thread.run, asyncio.sleep(0, "goes on")).result(TIMEOUT_S) == "goes on"


@pytest.mark.parametrize("end", [LoopThread.interrupt, LoopThread.close])
def test_work_that_exits_when_it_is_ended_is_answered_and_keeps_nobody_from_it(
    end: object, thread: LoopThread
) -> None:
    assert callable(end)
    exiting, other = Work(), Work()
    with ThreadPoolExecutor(2) as others:
        waiting = [others.submit(thread.run, exiting.do(exits=True)), others.submit(thread.run, other.do())]
        for work in (exiting, other):
            assert work.has_begun.wait(TIMEOUT_S)
        end(thread)
        with pytest.raises(SystemExit, match="enough"):
            waiting[0].result(TIMEOUT_S)
        with pytest.raises(SemelError, match="closed"):
            waiting[1].result(TIMEOUT_S)
    assert other.is_clean
