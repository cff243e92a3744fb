"""Claims about what a start must read: what came since the last checkpoint, and not all that ever came."""

from pathlib import Path

from confluent_kafka import Producer

import semel

SETTINGS = {"flush.interval.bytes": 200_000, "snapshot.interval.bytes": 50_000, "journal.file.bytes": 1 << 20}


def one_short_life(directory: Path) -> int:
    """Write less than a flush asks for, and stop; the bytes of journal that are left."""
    with semel.Broker(directory, settings=SETTINGS) as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for _ in range(60):
            producer.produce("t", b"x" * 1000)
        assert producer.flush(30) == 0
    return sum(path.stat().st_size for path in (directory / "journal").glob("*.journal"))


def test_short_lives_do_not_add_up_to_a_journal_without_end(tmp_path: Path) -> None:
    left = [one_short_life(tmp_path) for _ in range(16)]
    print(left)
    # 16 lives wrote about 1 MB. What a flush waits for, and the snapshot before the last, may be left.
    assert max(left) < 400_000
