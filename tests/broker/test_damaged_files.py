"""What a crash leaves half done is dropped in silence; what was durable and has changed stops the broker."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from broker_process import BrokerProcess, StartBroker
from raw_client import RawClient, create_topic, produce, values_in

from semel.disk import OsDisk
from semel.journal.chain import Chain
from semel.journal.format import FILE_HEADER_BYTES
from semel.wire.records import Record, build_batch

FAILED = 1
COUNT = 40
SECTOR_BYTES = 512
TORN_BYTES = 20_000


@pytest.fixture
def written(start_broker: StartBroker) -> BrokerProcess:
    """A broker with some records, a flush and two snapshots behind it, killed."""
    broker = start_broker(
        snapshot_interval_bytes=1, flush_interval_bytes=1, log_segment_bytes=2000, journal_file_bytes=1 << 20
    )
    with RawClient(broker.port) as client:
        create_topic(client, "t")
        for n in range(COUNT):
            assert produce(client, "t", batch(value(n))) == (0, n)
    assert broker.stop() == 0
    broker.start()
    with RawClient(broker.port) as client:
        assert produce(client, "t", batch(value(COUNT))) == (0, COUNT)
    broker.kill()
    return broker


def value(n: int, size: int = 200) -> bytes:
    return b"%d" % n + b"x" * size


def batch(content: bytes) -> bytes:
    return bytes(build_batch([Record(b"k", content, int(time.time() * 1000))]))


def assert_all_there(broker: BrokerProcess, values: list[bytes] | None = None) -> None:
    with RawClient(broker.port) as client:
        assert values_in(client, "t") == (values or [value(n) for n in range(COUNT + 1)])


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


def test_of_a_write_that_was_torn_nothing_is_kept_and_nothing_before_it_is_lost(
    written: BrokerProcess,
) -> None:
    """The bytes of the last write end anywhere, or some of them came and others did not."""
    for name in ("snapshot.interval.bytes", "flush.interval.bytes"):
        del written.settings[name]  # A snapshot would tell that the write was durable.
    kept = [value(n) for n in range(COUNT + 1)]
    while True:
        torn_value = value(len(kept), TORN_BYTES)
        written.start()
        with RawClient(written.port) as client:
            assert produce(client, "t", batch(torn_value)) == (0, len(kept))
        written.kill()
        journal, begins, ends, entries = last_group(written)
        if entries:
            break
        kept.append(torn_value)  # A second went by, and the journal says already that it is durable.
    content = journal.read_bytes()
    dice = random.Random(1)
    # The very last byte of a batch without headers is 0, as that of a file that was not written to.
    cuts = [begins + 1, begins + 41, ends - 2, *dice.sample(range(begins + 42, ends - 2), 4)]
    torn = [content[:cut].ljust(len(content), b"\0") for cut in cuts]
    sectors = range(begins // SECTOR_BYTES + 1, ends // SECTOR_BYTES)
    for lost in dice.sample(sectors, 4):
        at = lost * SECTOR_BYTES
        torn.append(content[:at] + bytes(SECTOR_BYTES) + content[at + SECTOR_BYTES :])
    before = copy_of(written.directory)
    for left in torn:
        put_back(before, written.directory)
        journal.write_bytes(left)
        written.start()
        assert_all_there(written, kept)
        written.kill()


def last_group(broker: BrokerProcess) -> tuple[Path, int, int, int]:
    """Where the last group of the journal lies: its file, from where to where; how many entries it has."""
    chain = Chain.open(OsDisk(), broker.directory / "journal")
    *_, last = chain.groups(chain.start)
    file = chain.files[-1]
    at = FILE_HEADER_BYTES - file.base
    return file.path, last.position + at, last.end + at, len(last.entries)


def copy_of(directory: Path) -> Path:
    return Path(shutil.copytree(directory, directory.with_name("before")))


def put_back(copy: Path, directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)


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
