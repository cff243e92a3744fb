"""A disk that fails: clients are told to retry, readers go on, and the broker comes back by itself.

On a simulated disk any operation can be made to fail, and after a power failure only what was synced is
certain to be there. On a small real one (tmpfs, which takes root to mount) somebody else takes the room.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from broker_process import StartBroker
from client_confluent import Confluent
from client_java import Java
from interop_cases import Record
from ledger import SteadyProducer, check_log, read_all
from raw_client import (
    FETCH_VERSION,
    METADATA_VERSION,
    PRODUCE_VERSION,
    RawClient,
    create_topic,
    encoded,
    fetch_request,
    produce,
    values_in,
)
from simulated_server import SimulatedServer

from semel.testing.simdisk import SimDisk
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataResponse
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.records import Record as WireRecord
from semel.wire.records import build_batch

MIB: Final = 1 << 20
RECOVERY_TIMEOUT_S: Final = 20.0
SEEDS: Final = int(os.environ.get("TEST_FAULT_SEEDS", "6"))
TINY: Final = {
    "journal.file.bytes": str(MIB),
    "snapshot.interval.bytes": str(64 << 10),
    "flush.interval.bytes": str(256 << 10),
    "log.segment.bytes": str(128 << 10),
    "log.retention.check.interval.ms": "200",
    "log.cleaner.backoff.ms": "200",
}
"""Settings under which everything that touches the disk happens all the time."""


def batch(value: bytes) -> bytes:
    return bytes(build_batch([WireRecord(b"k", value, int(time.time() * 1000))]))


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[SimulatedServer]:
    made = SimulatedServer(SimDisk(1)).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: SimulatedServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        create_topic(made, "t")
        for n in range(5):
            assert produce(made, "t", batch(b"before %d" % n)) == (0, n)
        yield made


# One fault, seen from a connection.


@pytest.mark.parametrize("kind", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_refused_and_the_next_life_takes_it(
    server: SimulatedServer, client: RawClient, kind: str, code: int
) -> None:
    with server.faults() as faults:
        faults.fail_next(kind, code)
    assert produce(client, "t", batch(b"refused")) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
    answers = [produce(client, "t", batch(b"again"))]
    while answers[-1][0] == ErrorCode.KAFKA_STORAGE_ERROR:
        assert len(answers) < 1000, "it does not recover"
        time.sleep(0.02)
        answers.append(produce(client, "t", batch(b"again")))
    assert answers[-1] == (0, 5), "what was refused has no offset"
    assert values_in(client, "t") == [
        b"before 0",
        b"before 1",
        b"before 2",
        b"before 3",
        b"before 4",
        b"again",
    ]


def test_a_broker_that_meets_corruption_while_it_recovers_gives_up_and_says_where(
    server: SimulatedServer, client: RawClient
) -> None:
    assert server.disk is not None
    journal = Path("/data/journal")
    with server.faults() as faults:
        (name,) = [name for name in server.disk.listdir(journal) if name.endswith(".journal")]
        marked = server.disk.content(journal / name).index(b"before 1")
        server.disk.corrupt(journal / name, marked)
        faults.fail_next("write", errno.EIO)
    assert produce(client, "t", batch(b"refused")) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
    assert server.gave_up.wait(RECOVERY_TIMEOUT_S)
    assert name in str(server.fatal_error)


def test_a_short_write_is_a_failed_write(server: SimulatedServer, client: RawClient) -> None:
    with server.faults() as faults:
        faults.shorten(faults.counts["write"] + 1, 20)
    assert produce(client, "t", batch(b"refused")) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
    wait_until(lambda: produce(client, "t", batch(b"again"))[0] == 0, "it does not recover")
    assert values_in(client, "t")[5:] == [b"again"]


def test_readers_go_on_while_nothing_can_be_written(server: SimulatedServer, client: RawClient) -> None:
    with server.faults() as faults:
        for n in range(1, 400):
            faults.fail("any", faults.counts["any"] + n, errno.ENOSPC)
    for _ in range(20):
        assert produce(client, "t", batch(b"refused"))[0] == ErrorCode.KAFKA_STORAGE_ERROR
        assert values_in(client, "t") == [b"before %d" % n for n in range(5)]
    # Without a reply that can be trusted there is none that is final: a coordinator is asked again.
    answer = client.ask(
        InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=1000), 4, InitProducerIdResponse
    )
    assert answer.error_code in (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
    with server.faults() as faults:
        faults.forget()
    wait_until(lambda: produce(client, "t", batch(b"again"))[0] == 0, "it does not recover")
    assert values_in(client, "t")[5:] == [b"again"]


def test_metadata_is_whole_or_not_given_at_all(server: SimulatedServer, client: RawClient) -> None:
    """A client that is told of no broker forgets the one it knows, and does not come back for minutes."""
    part = PartitionProduceData(index=0, records=memoryview(batch(b"refused")))
    wanted = ProduceRequest(
        acks=-1, timeout_ms=1000, topic_data=[TopicProduceData(name="t", partition_data=[part])]
    )
    with server.faults() as faults:
        faults.fail_next("sync")
    client.send(encoded(wanted, PRODUCE_VERSION) + encoded(MetadataRequest(topics=None), METADATA_VERSION))
    assert client.read_frame(), "the refusal of the produce"
    answer = client.read_frame()
    if answer:
        told = decode_response(memoryview(answer), ApiKey.METADATA, METADATA_VERSION, MetadataResponse)[1]
        assert [known.port for known in told.brokers] == [server.port]
        assert [topic.name for topic in told.topics] == ["t"]


def test_a_waiting_reader_gets_what_is_written_after_the_recovery(
    server: SimulatedServer, client: RawClient
) -> None:
    with RawClient(server.port) as reader:
        reader.send(_encoded_fetch("t", 5, max_wait_ms=20_000))
        with server.faults() as faults:
            faults.fail_next("sync")
        assert produce(client, "t", batch(b"refused"))[0] == ErrorCode.KAFKA_STORAGE_ERROR
        wait_until(lambda: produce(client, "t", batch(b"again"))[0] == 0, "it does not recover")
        assert b"again" in reader.read_frame()


def test_bytes_beyond_the_last_good_sync_are_never_believed(
    server: SimulatedServer, client: RawClient
) -> None:
    """The failed sync leaves the bytes in the cache, where a naive recovery would find them."""
    with server.faults() as faults:
        faults.fail_next("sync")
    assert produce(client, "t", batch(b"refused"))[0] == ErrorCode.KAFKA_STORAGE_ERROR
    wait_until(lambda: produce(client, "t", batch(b"again"))[0] == 0, "it does not recover")
    server.lose_power()
    server.start()
    with RawClient(server.port) as after:
        assert values_in(after, "t") == [b"before %d" % n for n in range(5)] + [b"again"]


def _encoded_fetch(topic: str, offset: int, max_wait_ms: int) -> bytes:
    return encoded(fetch_request(topic, offset, max_wait_ms=max_wait_ms), FETCH_VERSION)


# Faults at random under load.


@pytest.mark.parametrize("seed", range(SEEDS))
def test_librdkafka_survives_random_faults_and_power_failures(seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    server = SimulatedServer(SimDisk(seed), settings=TINY).start()
    try:
        topics = {"steady": 2, "compacted": 1}
        admin = Confluent(server.bootstrap)
        admin.create_topic("steady", 2)
        admin.create_topic("compacted", 1, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"})
        producers = [
            SteadyProducer(server.bootstrap, n, topics, seed=seed, value_bytes=2000) for n in range(2)
        ]
        for _ in range(12):
            time.sleep(dice.random() * 0.3)
            if dice.random() < 0.25:
                server.lose_power()
                server.bring_up()
            else:
                plan_fault(server, dice)
        with server.faults() as faults:
            faults.forget()
        for producer in producers:
            producer.finish()
        server.lose_power()
        server.start()
        for topic, partitions in topics.items():
            for partition in range(partitions):
                messages = read_all(server.bootstrap, topic, partition)
                acknowledged = [producer.acknowledged for producer in producers]
                complete = topic == "steady"
                check_log(messages, producers, acknowledged, topic, partition, complete=complete)
                if complete:
                    assert len(messages) == sum(producer.sent[topic, partition] for producer in producers)
                else:
                    assert_newest_of_every_key(producers, {message.offset() for message in messages})
    finally:
        server.stop()


def assert_newest_of_every_key(producers: list[SteadyProducer], offsets: set[int | None]) -> None:
    for producer in producers:
        for offset in producer.newest_of_key("compacted", 0).values():
            assert offset in offsets, f"the newest record of a key, at {offset}, is gone"


def plan_fault(server: SimulatedServer, dice: random.Random) -> None:
    """Let one of the next operations fail, or several in a row."""
    with server.faults() as faults:
        match dice.randrange(4):
            case 0:
                faults.shorten(faults.counts["write"] + dice.randint(1, 5), dice.randrange(300))
            case 1:
                first = faults.counts["any"] + dice.randint(1, 20)
                for n in range(dice.randint(2, 40)):
                    faults.fail("any", first + n, errno.ENOSPC)
            case _:
                kind = dice.choice(
                    ("write", "sync", "sync", "create", "rename", "sync_dir", "allocate", "unlink")
                )
                faults.fail(
                    kind, faults.counts[kind] + dice.randint(1, 6), dice.choice((errno.EIO, errno.ENOSPC))
                )


# A full disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(64 << 10))
        except OSError as error:
            assert error.errno == errno.ENOSPC


class JavaProducer:
    """A Java producer that sends one batch after another, and knows of nothing but success."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.sent = 0
        self.failure: BaseException | None = None
        self._java = Java(bootstrap)
        self._topic = topic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                records = [
                    Record(b"java", b"%d" % (self.sent + n), int(time.time() * 1000)) for n in range(20)
                ]
                assert self._java.produce(self._topic, records) == list(range(self.sent, self.sent + 20))
                self.sent += 20
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        self._java.close()
        assert self.failure is None, self.failure


@pytest.mark.parametrize("floor_bytes", [0, 4 * MIB])
@pytest.mark.timeout(180)
def test_a_full_disk_is_waited_out(start_broker: StartBroker, small_disk: Path, floor_bytes: int) -> None:
    broker = start_broker(
        small_disk / "data",
        journal_file_bytes=MIB,
        snapshot_interval_bytes=256 << 10,
        flush_interval_bytes=MIB,
        log_segment_bytes=256 << 10,
        storage_min_free_bytes=floor_bytes,
    )
    pid = broker.pid
    admin = Confluent(broker.bootstrap)
    admin.create_topic("steady", 2)
    admin.create_topic("java", 1)
    topics = {"steady": 2}
    producers = [
        SteadyProducer(broker.bootstrap, n, topics, seed=n, value_bytes=500, pause_s=0.005) for n in range(2)
    ]
    java = JavaProducer(broker.bootstrap, "java") if Java.missing() is None else None
    wait_until(lambda: all(len(producer.acknowledged) > 100 for producer in producers), "nothing is written")
    fill(small_disk / "ballast")
    words = "the disk failed" if floor_bytes == 0 else "appends are refused"
    wait_until(lambda: words in broker.log, "the full disk is not noticed")
    wait_until(lambda: is_standing_still(producers), "writes are taken though the disk is full")
    for partition in range(2):
        messages = read_all(broker.bootstrap, "steady", partition)
        # What became durable in the moment of the failure may have been acknowledged, and is shown later.
        visible = [visible_of(producer, partition, len(messages)) for producer in producers]
        check_log(messages, producers, visible, "steady", partition)
    (small_disk / "ballast").unlink()
    before = [len(producer.acknowledged) for producer in producers]
    wait_until(
        lambda: all(
            len(producer.acknowledged) > was + 100 for producer, was in zip(producers, before, strict=True)
        ),
        "writes are not taken again",
    )
    for producer in producers:
        producer.finish()
    if java is not None:
        java.finish()
    assert broker.pid == pid and broker.is_alive
    for _ in range(2):
        acknowledged = [dict(producer.acknowledged) for producer in producers]
        for partition in range(2):
            messages = read_all(broker.bootstrap, "steady", partition)
            check_log(messages, producers, acknowledged, "steady", partition)
            assert len(messages) == sum(producer.sent["steady", partition] for producer in producers)
        if java is not None:
            values = [message.value() for message in read_all(broker.bootstrap, "java", 0)]
            assert values == [b"%d" % n for n in range(java.sent)]
        broker.restart()


def visible_of(producer: SteadyProducer, partition: int, end: int) -> dict[tuple[str, int, int], int]:
    """What a producer was told of a partition, as far as readers could see when it ended at `end`."""
    return {
        sent: offset
        for sent, offset in dict(producer.acknowledged).items()
        if sent[1] == partition and offset < end
    }


def is_standing_still(producers: list[SteadyProducer]) -> bool:
    before = [len(producer.acknowledged) for producer in producers]
    time.sleep(0.5)
    return before == [len(producer.acknowledged) for producer in producers]


def test_topics_can_be_deleted_on_a_full_disk(start_broker: StartBroker, small_disk: Path) -> None:
    broker = start_broker(
        small_disk / "data",
        journal_file_bytes=MIB,
        log_segment_bytes=256 << 10,
        flush_interval_bytes=MIB,
        storage_min_free_bytes=4 * MIB,
    )
    admin = Confluent(broker.bootstrap)
    admin.create_topic("large", 1)
    admin.create_topic("small", 1)
    with RawClient(broker.port) as client:
        for _ in range(1000):
            code, _ = produce(client, "large", batch(bytes(200_000)))
            if code:
                break
        assert code == ErrorCode.KAFKA_STORAGE_ERROR, "the disk did not fill up"
        wait_until(lambda: "large" not in admin.topics() or delete(admin, "large"), "the topic stays")
        wait_until(
            lambda: produce(client, "small", batch(b"there is room"))[0] == 0, "deleting freed no room"
        )


def delete(admin: Confluent, topic: str) -> bool:
    try:
        admin.delete_topic(topic)
    except Exception as error:
        print(f"deleting: {error}")
    return False
