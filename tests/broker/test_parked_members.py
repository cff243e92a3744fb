"""Members that wait in a rebalance: when the broker stops, their connection is lost, or the disk fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from group_runs import PAUSE_S, Member, Run, assignment
from raw_client import encoded

from semel.disk import Buffer, OsDisk, OsFile
from semel.embedded import Broker
from semel.errors import StorageError
from semel.server.listener import Server
from semel.server.settings import Settings
from semel.wire.errors import ErrorCode
from semel.wire.messages import offset_commit as committing


class BreakableFile(OsFile):
    """A file that takes no more journal when its disk is broken."""

    __slots__ = ("disk",)
    disk: BreakableDisk

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        if self.disk.is_broken:
            raise StorageError("the disk is broken, as the test wants it")
        return super().pwritev_sync(buffers, offset)


class BreakableDisk(OsDisk):
    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def create(self, path: Path) -> OsFile:
        return self._breakable(super().create(path))

    def open(self, path: Path, *, writable: bool = False) -> OsFile:
        return self._breakable(super().open(path, writable=writable))

    def _breakable(self, file: OsFile) -> OsFile:
        fd = file.fileno()
        assert fd is not None
        breakable = BreakableFile(file.path, fd)
        breakable.disk = self
        return breakable


@contextmanager
def serving(disk: BreakableDisk, directory: Path) -> Iterator[int]:
    """A server on this disk, in a thread of its own; its port."""
    flags = {"listeners": "127.0.0.1:0", "log.dirs": str(directory)}
    server = Server(Settings.load(flags=flags), disk=disk)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
    try:
        yield int(server.bootstrap.rpartition(":")[2])
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_on(broker: Broker) -> Run:
    return Run(int(broker.bootstrap.rpartition(":")[2]))


def settled(run: Run) -> Member:
    member = run.member()
    member.join()
    member.ask(member.sync_request({member.member_id: assignment(run.topic, 0, 1, 2, 3)}), 5)
    return member


def waiting(run: Run, first: Member) -> Member:
    """A second member whose request to join is parked until the first one joins again."""
    second = run.member()
    second.send_join()
    second.read_join()
    second.send_join()
    while first.beat("") == 0:
        time.sleep(PAUSE_S)
    return second


def test_a_broker_that_stops_sends_those_who_wait_to_look_for_another() -> None:
    with Broker() as broker:
        run = run_on(broker)
        second = waiting(run, settled(run))
        begun = time.monotonic()
    assert second.read_join() == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert time.monotonic() - begun < 5, "nobody waits for the rebalance"


def test_a_leader_that_never_syncs_does_not_keep_a_broker_from_stopping() -> None:
    with Broker() as broker:
        run = run_on(broker)
        first = settled(run)
        second = waiting(run, first)
        first.send_join()
        assert first.read_join() == second.read_join() == 0
        second.send(second.sync_request(), 5)
        begun = time.monotonic()
    assert second.read().error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert time.monotonic() - begun < 5


def test_a_member_that_lost_its_connection_gets_the_generation_on_the_next_one() -> None:
    with Broker() as broker:
        run = run_on(broker)
        first = settled(run)
        second = waiting(run, first)
        again = run.member()
        again.member_id, again.protocols = second.member_id, second.protocols
        second.client.socket.close()
        first.send_join()
        assert first.read_join() == 0
        again.send_join()
        assert again.read_join() == 0
        assert again.generation == first.generation == 2
        assert again.leader == first.member_id


def test_when_the_disk_fails_those_who_wait_are_told_and_the_last_finished_rebalance_holds(
    tmp_path: Path,
) -> None:
    disk = BreakableDisk()
    with serving(disk, tmp_path) as port:
        run = Run(port)
        first = settled(run)
        second = waiting(run, first)
        disk.is_broken = True
        run.client.send(commit_request(run, first))
        assert second.read_join() == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert first.beat("") == ErrorCode.COORDINATOR_NOT_AVAILABLE
        run.client.read_frame()
        disk.is_broken = False
        while (code := first.beat("")) == ErrorCode.COORDINATOR_NOT_AVAILABLE:
            time.sleep(PAUSE_S)
        assert code == 0, "its generation has survived, and the newcomer has not"
        run.fetch("after the failure")
        assert run.trace["after the failure"] == "NONE 0:-1::NONE", "what was refused has left no trace"
        second.member_id = ""
        second.send_join()
        assert second.read_join() == ErrorCode.MEMBER_ID_REQUIRED
        second.send_join()
        while first.beat("") == 0:
            time.sleep(PAUSE_S)
        first.send_join()
        assert first.read_join() == second.read_join() == 0
        assert first.generation == second.generation == 2


def commit_request(run: Run, member: Member) -> bytes:
    part = committing.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=1, committed_metadata=""
    )
    request = committing.OffsetCommitRequest(
        group_id=run.group,
        generation_id_or_member_epoch=member.generation,
        member_id=member.member_id,
        topics=[committing.OffsetCommitRequestTopic(name=run.topic, partitions=[part])],
    )
    return encoded(request, 9)
