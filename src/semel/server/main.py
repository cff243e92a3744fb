"""Run a broker as a process: until SIGTERM, or SIGINT, or a second SIGINT that does not wait."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final

from semel.disk import OsDisk
from semel.server.listener import Server
from semel.server.settings import Settings

log = logging.getLogger(__name__)

INTERRUPTED: Final = 130
SWITCH_INTERVAL_S: Final = 0.0005
"""How long the event loop may keep the interpreter from the journal's thread, which comes from the disk with
what clients wait for."""
GC_THRESHOLDS: Final = (50_000, 20, 50)
"""Requests leave no cycles behind, only connections and errors do: look for them seldom."""


Beside = Callable[[str], AbstractAsyncContextManager[object]]
"""What runs in the broker's process as a client of it, by its address."""


def serve(settings: Settings, *, in_memory: bool = False, beside: Beside = nullcontext) -> int:
    """Run until told to stop; the exit code of the process."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run(_serve(settings, in_memory, beside))
    return 0


async def _serve(settings: Settings, in_memory: bool, beside: Beside) -> None:
    stop = asyncio.Event()
    server = Server(settings, disk=None if in_memory else OsDisk(), on_fatal=stop.set)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, _interrupt, stop)
    await server.start()
    _settle()
    where = "in memory" if in_memory else str(server.node.layout.root)
    try:
        async with beside(server.bootstrap):
            print(f"ready {server.bootstrap} ({where})", flush=True)  # noqa: T201 - scripts wait for this line
            await stop.wait()
            log.info("stopping: answering what is under way")
    finally:
        await server.stop()
    if server.node.fatal_error is not None:
        raise server.node.fatal_error


def _settle() -> None:
    """What the process has loaded by now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _interrupt(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(INTERRUPTED)  # Everything acknowledged is on disk; the next start recovers the rest.
    stop.set()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where there is a wheel of it, otherwise on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
