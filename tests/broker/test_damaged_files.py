"""What a crash leaves half done is dropped in silence; what was durable and has changed stops the broker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from broker_process import BrokerProcess, StartBroker
from raw_client import RawClient, create_topic, produce, values_in

from semel.journal.format import FILE_HEADER_BYTES
from semel.wire.records import Record, build_batch

FAILED = 1
COUNT = 40


@pytest.fixture
def written(start_broker: StartBroker) -> BrokerProcess:
    """A broker with some records, a flush and two snapshots behind it, killed."""
    broker = start_broker(
        snapshot_interval_bytes=1, flush_interval_bytes=1, log_segment_bytes=2000, journal_file_bytes=1 << 20
    )
    with RawClient(broker.port) as client:
        create_topic(client, "t")
        for n in range(COUNT):
            assert produce(client, "t", batch(n)) == (0, n)
    assert broker.stop() == 0
    broker.start()
    with RawClient(broker.port) as client:
        assert produce(client, "t", batch(COUNT)) == (0, COUNT)
    broker.kill()
    return broker


def batch(n: int) -> bytes:
    return bytes(build_batch([Record(b"k", b"%d" % n + b"x" * 200, int(time.time() * 1000))]))


def assert_all_there(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        assert values_in(client, "t") == [b"%d" % n + b"x" * 200 for n in range(COUNT + 1)]


def newest(broker: BrokerProcess, pattern: str) -> Path:
    """The file that was written last."""
    return max(broker.directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def used_bytes(path: Path) -> int:
    return max(len(path.read_bytes().rstrip(b"\0")), FILE_HEADER_BYTES)


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_an_unfinished_write_is_cut_and_nothing_acknowledged_is_lost(
    written: BrokerProcess, size: int
) -> None:
    journal = newest(written, "journal/*.journal")
    with journal.open("r+b") as file:
        file.seek(used_bytes(journal) + 8)
        file.write(random.Random(size).randbytes(size))
    written.start()
    assert_all_there(written)


def test_a_damaged_snapshot_is_passed_over(written: BrokerProcess) -> None:
    snapshot = newest(written, "snapshots/*.snapshot")
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 0xFF
    snapshot.write_bytes(content)
    written.start()
    assert_all_there(written)


def test_what_is_left_of_temporary_files_does_not_matter(written: BrokerProcess) -> None:
    for name in ("journal/7.spare", "snapshots/snapshot.reserve", "identity.new"):
        (written.directory / name).write_bytes(random.Random(1).randbytes(3000))
    written.start()
    assert_all_there(written)


def lose_a_segment(broker: BrokerProcess) -> Path:
    segment = min(broker.directory.glob("segments/*/0/*.log"))
    segment.unlink()
    return segment.parent


def lose_the_journal(broker: BrokerProcess) -> Path:
    for path in broker.directory.glob("journal/*.journal"):
        path.unlink()
    return broker.directory / "journal"


def damage_the_journal(broker: BrokerProcess) -> Path:
    """Somewhere before a group that says that everything up to it was durable."""
    journal = newest(broker, "journal/*.journal")
    content = bytearray(journal.read_bytes())
    content[FILE_HEADER_BYTES + 60] ^= 0xFF
    journal.write_bytes(content)
    return journal


def lose_the_identity(broker: BrokerProcess) -> Path:
    identity = broker.directory / "identity"
    identity.write_bytes(b"nonsense")
    return identity


@pytest.mark.parametrize(
    "harm",
    [lose_a_segment, lose_the_journal, damage_the_journal, lose_the_identity],
    ids=lambda f: f.__name__,
)
def test_a_loss_of_what_was_durable_is_refused_and_named(
    written: BrokerProcess, harm: Callable[[BrokerProcess], Path]
) -> None:
    harmed = harm(written)
    for _ in range(2):
        refused = written.run_to_end()
        assert refused.returncode == FAILED, refused.stderr
        last = refused.stderr.splitlines()[-1]
        assert str(harmed) in last and "restore" in last
        assert "Traceback" not in refused.stderr
