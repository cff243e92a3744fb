"""Frames are cut out of the stream wherever the network happened to split it."""

import pytest

from semel.client.framing import RECEIVE_BUFFER_BYTES, FrameProtocol
from semel.errors import ProtocolError


class Collector(FrameProtocol):
    def __init__(self, max_frame_bytes: int = 1_000_000) -> None:
        super().__init__(max_frame_bytes)
        self.frames: list[bytes] = []
        self.views: list[memoryview] = []
        self.failure: ProtocolError | None = None

    def frame_received(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))
        self.views.append(frame)

    def framing_failed(self, error: ProtocolError) -> None:
        self.failure = error

    def feed(self, stream: bytes, step: int) -> None:
        at = 0
        while at < len(stream):
            room = self.get_buffer(-1)
            taken = min(len(room), step, len(stream) - at)
            assert taken > 0, "the protocol offered no room"
            room[:taken] = stream[at : at + taken]
            self.buffer_updated(taken)
            at += taken


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64, 10_000_000])
def test_frames_arrive_whole_however_the_stream_is_split(step: int) -> None:
    frames = [b"", b"a", b"bc" * 10, bytes(range(256)), b"", b"last"]
    collector = Collector()
    collector.feed(framed(*frames), step)
    assert collector.frames == frames


@pytest.mark.parametrize("size", [RECEIVE_BUFFER_BYTES + delta for delta in (-5, -4, -3, 0, 1, 100_000)])
def test_a_frame_about_as_large_as_the_receive_buffer_arrives_whole(size: int) -> None:
    large = bytes(i * 7 & 0xFF for i in range(size))
    collector = Collector()
    collector.feed(framed(b"before", large, b"after"), 50_000)
    assert collector.frames == [b"before", large, b"after"]


def test_a_frame_stays_as_it_was_when_later_ones_arrive() -> None:
    collector = Collector()
    collector.feed(framed(b"first"), 100)
    collector.feed(framed(b"other", b"x" * 100_000), 100)
    assert bytes(collector.views[0]) == b"first"


@pytest.mark.parametrize("size", [-1, -(2**31), 1001, 2**31 - 1])
def test_an_impossible_size_is_refused_before_anything_is_allocated(size: int) -> None:
    collector = Collector(max_frame_bytes=1000)
    collector.feed(size.to_bytes(4, "big", signed=True), 4)
    assert collector.failure is not None
    assert str(size) in str(collector.failure)
    assert collector.frames == []
