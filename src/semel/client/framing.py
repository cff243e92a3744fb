"""Cutting a byte stream into Kafka's size-prefixed frames, with as little copying as asyncio allows.

Small frames are read many at a time into one receive buffer and copied out of it, because decoded messages
keep views of their frame. A frame that does not fit in there gets a buffer of its own, and the socket reads
straight into it: what a fetch brings is never copied.
"""

import asyncio
from struct import Struct
from typing import Final

from semel.errors import ProtocolError

SIZE: Final = Struct(">i")
SIZE_BYTES: Final = 4
RECEIVE_BUFFER_BYTES: Final = 64 * 1024
DEFAULT_MAX_FRAME_BYTES: Final = 128 * 1024 * 1024


class FrameProtocol(asyncio.BufferedProtocol):
    """Calls `frame_received` for every frame; a frame of an impossible size goes to `framing_failed`."""

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._shared = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self._filled = 0  # bytes in the shared buffer that belong to no whole frame yet
        self._large: memoryview | None = None  # the frame that is being read into its own buffer
        self._large_filled = 0

    def frame_received(self, frame: memoryview) -> None:
        """One frame, without its size; it stays valid."""
        raise NotImplementedError

    def framing_failed(self, error: ProtocolError) -> None:
        """The stream makes no sense from here on."""
        raise NotImplementedError

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._shared[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is not None:
            self._large_filled += nbytes
            if self._large_filled == len(self._large):
                frame, self._large = self._large, None
                self.frame_received(frame)
            return
        self._filled += nbytes
        self._cut()

    def _cut(self) -> None:
        shared, end, start = self._shared, self._filled, 0
        while end - start >= SIZE_BYTES:
            size: int = SIZE.unpack_from(shared, start)[0]
            if size < 0 or size > self._max_frame_bytes:
                self._filled = 0
                self.framing_failed(
                    ProtocolError(
                        f"a frame of {size} bytes was announced, and the limit is {self._max_frame_bytes}: "
                        "it speaks another protocol (TLS or HTTP?) or the limit is too low"
                    )
                )
                return
            frame_start = start + SIZE_BYTES
            start = frame_start + size
            if start > end:
                self._keep(frame_start - SIZE_BYTES, frame_start, size)
                return
            self.frame_received(memoryview(bytes(shared[frame_start:start])))
        self._move_to_front(start)

    def _keep(self, start: int, frame_start: int, size: int) -> None:
        """Sets an unfinished frame up for the next read."""
        if SIZE_BYTES + size <= RECEIVE_BUFFER_BYTES:
            self._move_to_front(start)
            return
        large = memoryview(bytearray(size))
        arrived = self._filled - frame_start
        large[:arrived] = self._shared[frame_start : self._filled]
        self._large, self._large_filled = large, arrived
        self._filled = 0

    def _move_to_front(self, start: int) -> None:
        rest = self._filled - start
        if rest and start:
            self._shared[:rest] = bytes(self._shared[start : self._filled])
        self._filled = rest
