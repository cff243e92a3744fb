"""Lines of stdin for an event loop, without a thread that keeps the process from ending.

A daemon thread reads the file descriptor itself. It never holds a lock of Python's buffered stdin, which
would make the interpreter abort when it is interrupted in the middle of a read.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Final

from semel.errors import ConfigError

READ_BYTES: Final = 64 * 1024
QUEUED_CHUNKS: Final = 4
MAX_LINE_BYTES: Final = 64 * 1024 * 1024


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Yields lines without their newline, as many as came in at once."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(QUEUED_CHUNKS)
    reader = threading.Thread(target=_read, args=(descriptor, loop, chunks), daemon=True, name="stdin")
    reader.start()
    rest = b""
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ConfigError(f"a line is longer than {MAX_LINE_BYTES} bytes: no broker would take it")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _read(descriptor: int, loop: asyncio.AbstractEventLoop, chunks: "asyncio.Queue[bytes | OSError]") -> None:
    chunk: bytes | OSError = b"-"
    try:
        while chunk and not isinstance(chunk, OSError):
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except OSError as error:
                chunk = error
            asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
    except (RuntimeError, asyncio.CancelledError):
        # The loop has ended: nobody wants the rest.
        return
