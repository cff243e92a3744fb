"""How a life begins: at a start, and after a failed write.

The order is that of `docs/design/journal.md`: the chain of journal files, the newest snapshot that it goes on
from, a new generation, and then everything that the journal has beyond the snapshot. It runs in a worker
thread, since it may take long, and in a simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from semel.broker.core import Broker
from semel.broker.decision import Decision
from semel.broker.journal_messages import EpochsUnsynced
from semel.disk import Disk
from semel.errors import CorruptionError
from semel.journal.chain import Chain
from semel.journal.generation import begin_generation
from semel.journal.settings import JournalSettings
from semel.journal.snapshot import hold_reserve, load_newest
from semel.journal.writer import JournalWriter
from semel.server.life import Job, Life
from semel.server.recovery import Layout, Replay
from semel.storage.partition import Placement
from semel.storage.store import Store

log = logging.getLogger(__name__)


class Host(Protocol):
    """What a life needs of whoever runs it."""

    def new_life(self, broker: Broker, store: Store, journal: JournalWriter) -> Life: ...

    def new_broker(self, leader_epoch: int) -> Broker: ...

    def in_background(self, job: Job) -> None:
        """Run a job that nobody waits for."""

    def journal_released(self, journal: JournalWriter, position: int) -> None:
        """Called in the thread of the journal's writer."""

    def journal_failed(self, journal: JournalWriter, error: BaseException, durable: int) -> None:
        """Called in the thread of the journal's writer, once at most."""


class Reports:
    """Tells the host which journal it is that reports."""

    __slots__ = ("_host", "journal")

    def __init__(self, host: Host) -> None:
        self._host = host
        self.journal: JournalWriter | None = None

    def released(self, position: int) -> None:
        assert self.journal is not None
        self._host.journal_released(self.journal, position)

    def failed(self, error: BaseException, durable: int) -> None:
        assert self.journal is not None
        self._host.journal_failed(self.journal, error, durable)


def build_life(
    host: Host,
    disk: Disk,
    layout: Layout,
    settings: JournalSettings,
    *,
    salt: Callable[[], int],
    limit: int | None = None,
    synced: int = 0,
    predecessor: Store | None = None,
) -> Life:
    """A life from what is on disk. After a failed write, nothing beyond `limit` counts."""
    chain = Chain.open(disk, layout.journal, limit=limit, synced=synced)
    _check_present(disk, layout, chain)
    hold_reserve(disk, layout.snapshots, 0)
    snapshot = load_newest(disk, layout.snapshots, chain)
    if chain.torn is not None:
        log.warning(
            "the last write before the stop was not complete; cut %s at %d",
            chain.torn.path,
            chain.torn.position,
        )
    generation = begin_generation(
        disk,
        layout.journal,
        chain,
        settings,
        salt=salt(),
        above=0 if snapshot is None else snapshot.generation,
    )
    broker = host.new_broker(generation.number)
    store = Store(disk, layout.segments) if predecessor is None else predecessor.successor()
    replay = Replay(broker, store)
    horizon = 0
    if snapshot is not None:
        horizon = snapshot.horizon
        for group in generation.chain.groups(horizon):
            replay.foresee(group)
        replay.load(snapshot)
    for group in generation.chain.groups(horizon):
        replay.replay(group)
    replay.finish()
    reports = Reports(host)
    journal = reports.journal = JournalWriter(
        disk,
        layout.journal,
        generation,
        settings,
        after_sync=partial(write_placements, store),
        on_released=reports.released,
        on_failure=reports.failed,
    )
    life = host.new_life(broker, store, journal)
    life.dirty = replay.dirty
    life.snapshot_at = 0 if snapshot is None else snapshot.highest_stamp
    if settings.durability == "os" and not broker.producer_ids.epochs_unsynced:
        # On disk before the first answer that is not: the next start must know.
        life.submit(None, Decision(None, [EpochsUnsynced()], sync=True))
    return life


def _check_present(disk: Disk, layout: Layout, chain: Chain) -> None:
    if chain.generation == 0 and disk.listdir(layout.segments):
        raise CorruptionError(
            f"{layout.journal} is empty, and yet there are segments in {layout.segments}; "
            "is the journal's volume mounted? Otherwise restore the directory from a backup"
        )


def write_placements(store: Store, attachments: list[object]) -> None:
    """Write the batches of groups that are durable to their segments."""
    placements: list[Placement] = []
    for attachment in attachments:
        assert isinstance(attachment, list)
        placements += attachment
    store.write(placements)
