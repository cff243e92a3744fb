"""Claims about a wall clock that jumps: nothing is lost, and what waits does not wait by it."""

from __future__ import annotations

import time

from raw_client import RawClient, create_topic, produce, values_in
from simulated_server import SimulatedServer

from semel.testing.simdisk import SimDisk
from semel.wire.batch import read_header
from semel.wire.errors import ErrorCode
from semel.wire.records import Record, build_batch

HOUR_MS = 3_600_000


class JumpingClock:
    """The machine's time, with a wall clock that somebody sets."""

    def __init__(self) -> None:
        self.jump_ms = 0

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.jump_ms

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def batch(clock: JumpingClock, value: bytes, sequence: int) -> bytes:
    record = Record(b"k", value, clock.wall_ms())
    return bytes(build_batch([record], producer_id=7, producer_epoch=0, base_sequence=sequence))


def test_a_clock_that_jumps_back_loses_nothing_and_disturbs_nobody() -> None:
    clock = JumpingClock()
    server = SimulatedServer(
        SimDisk(1), clock=clock, settings={"log.retention.check.interval.ms": "1"}
    ).start()
    with RawClient(server.port) as client:
        create_topic(client, "t")
        for n in range(3):
            assert produce(client, "t", batch(clock, b"%d" % n, n)) == (0, n)
        clock.jump_ms = -12 * HOUR_MS
        for n in range(3, 6):
            assert produce(client, "t", batch(clock, b"%d" % n, n)) == (0, n)
        assert produce(client, "t", batch(clock, b"1", 1)) == (0, 1), "a duplicate is known by its sequence"
        assert values_in(client, "t") == [b"%d" % n for n in range(6)]
    server.stop()
    clock.jump_ms = -24 * HOUR_MS
    server.start()
    with RawClient(server.port) as client:
        assert produce(client, "t", batch(clock, b"6", 6)) == (0, 6)
        # A client whose clock did not jump is told why it is refused, and nothing of it is kept.
        clock.jump_ms = 0
        future = batch(clock, b"from the future", 7)
        clock.jump_ms = -24 * HOUR_MS
        assert produce(client, "t", future)[0] == ErrorCode.INVALID_TIMESTAMP
        assert values_in(client, "t") == [b"%d" % n for n in range(7)]
        assert read_header(future).base_sequence == 7
    server.stop()
