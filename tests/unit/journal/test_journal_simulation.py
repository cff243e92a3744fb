"""Whole lives of a journal on a simulated disk, from seeds, against a model.

The model is a list of (end position, payload). Its first part is *safe*: it was synced, or found at a start,
so it must be found for ever. The rest is *pending*: appended, not synced. At each start the journal must hold
all of the safe part, then a prefix of the pending part (a group is whole or absent, and order is kept), and
nothing else. What is found at a start is safe from then on.
"""

import os
import random

import pytest
from journal_cases import FILE_BYTES, Life

from semel.errors import CorruptionError, StorageError
from semel.journal.settings import Durability
from semel.testing.simdisk import Faults, PowerLoss, SimDisk

RUNS = int(os.environ.get("TEST_SIMULATION_RUNS", "50"))
"""How many seeds; `script/test` asks for more."""

Groups = list[tuple[int, bytes]]


class Model:
    """What must be there, and what may be."""

    def __init__(self) -> None:
        self.safe: Groups = []
        self.pending: Groups = []
        self.horizon = 0
        self.generation = 0

    def appended(self, end: int, payload: bytes) -> None:
        self.pending.append((end, payload))

    def released(self, position: int) -> None:
        """Everything up to a position has become safe."""
        while self.pending and self.pending[0][0] <= position:
            self.safe.append(self.pending.pop(0))

    def deleted(self, horizon: int) -> None:
        """Nothing below a position is asked for any more."""
        self.horizon = horizon
        self.safe = [group for group in self.safe if group[0] > horizon]

    def check(self, life: Life, believed: int | None, at_least: int = 0) -> None:
        """Compare with what a new life found; `believed` is where a recovery in the same process must end."""
        found = life.found_at(self.horizon)
        may_be = self.safe + self.pending
        assert life.chain.end >= at_least
        assert found[: len(self.safe)] == self.safe
        assert found == may_be[: len(found)]
        if believed is not None:
            assert life.chain.end <= believed
            assert found == [group for group in may_be if group[0] <= believed]
        assert life.writer.generation > self.generation
        self.generation = life.writer.generation
        self.safe = found
        self.pending = []


class Simulation:
    """One run: a seed decides sizes, faults and crashes."""

    def __init__(self, seed: int, durability: Durability) -> None:
        self.random = random.Random(seed)
        self.disk = SimDisk(seed)
        self.durability: Durability = durability
        self.model = Model()
        self.written = 0
        self.cached = 0
        """What was in the page cache when the process ended."""
        self.life = self.next_life(None)

    def run(self, lives: int) -> None:
        for _ in range(lives):
            believed = self.live()
            self.life = self.next_life(believed)

    def next_life(self, believed: int | None) -> Life:
        """Open the journal, through as many failures and power cuts as the dice want."""
        while True:
            self.plan_trouble(0.3)
            synced = 0 if believed is None else self.life.writer.synced
            try:
                life = Life(self.disk, limit=believed, synced=synced, durability=self.durability)
                self.model.check(life, believed, self.cached)
                self.cached = 0
                return life
            except CorruptionError:
                raise
            except StorageError:
                if self.random.random() < 0.3:
                    believed = None
                    self.disk.kill()
            except PowerLoss:
                believed = None
                self.power_fails()

    def live(self) -> int | None:
        """Append, write and delete until the life ends; after a failure, the position that recovery gets."""
        self.plan_trouble(0.5)
        for _ in range(self.random.randrange(30)):
            self.act()
            self.model.released(self.life.writer.synced)
            if self.life.failures:
                break
        failed = bool(self.life.failures)
        if failed and isinstance(self.life.failures[0], PowerLoss):
            self.power_fails()
            return None
        ending = self.random.randrange(4)
        if failed and ending > 0:
            return self.life.believed
        if ending == 1:
            self.life.writer.close()
            self.model.released(self.life.writer.synced)
            if self.life.failures and isinstance(self.life.failures[0], PowerLoss):
                self.power_fails()
                return None
        if ending == 2:
            self.power_fails()
        else:
            # Without a power failure the page cache is as good as the disk, unless a sync failed.
            self.cached = 0 if self.life.failures else self.life.writer.written
            self.disk.kill()
        return None

    def act(self) -> None:
        writer = self.life.writer
        if writer.failure is not None:
            return
        dice = self.random.randrange(10)
        if dice < 6:
            size = self.random.choice((0, 10, 300, 5000, FILE_BYTES // 2, FILE_BYTES + 100))
            payload = b"%d:" % self.written + self.random.randbytes(self.random.randint(0, size))
            self.written += 1
            end = writer.append([[payload[:5], payload[5:]]], sync=self.random.random() < 0.2)
            self.model.appended(end, payload)
        elif dice < 9:
            writer.step()
        elif self.model.safe and writer.synced >= self.model.safe[0][0]:
            # What is deleted must be in a snapshot, which holds nothing that is not synced.
            synced = [end for end, _ in self.model.safe if end <= writer.synced]
            self.model.deleted(self.random.choice(synced))
            writer.delete_before(self.model.horizon)

    def power_fails(self) -> None:
        self.cached = 0
        self.disk.crash()

    def plan_trouble(self, probability: float) -> None:
        faults = self.disk.faults
        if self.random.random() < probability:
            kind = self.random.choice(
                ("write", "sync", "allocate", "rename", "sync_dir", "create", "unlink", "any")
            )
            faults.fail(kind, faults.counts[kind] + self.random.randint(1, 12))
        if self.random.random() < probability / 2:
            faults.shorten(faults.counts["write"] + self.random.randint(1, 8), self.random.randrange(2000))
        if self.random.random() < probability:
            faults.lose_power(faults.counts["any"] + self.random.randint(1, 25))


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_what_was_released_survives_every_crash_and_nothing_else_appears(durability: Durability) -> None:
    for seed in range(RUNS):
        try:
            Simulation(seed, durability).run(lives=12)
        except BaseException:
            print(f"seed {seed}, durability {durability}")
            raise


def scripted(disk: SimDisk, model: Model) -> None:
    """A life with everything in it: a start, rolls, a large group, a deletion, a close, a second start."""
    for _ in range(2):
        life = Life(disk)
        model.check(life, None)
        for size in (10, 5000, 20000, FILE_BYTES + 5, 100, 3, 9000):
            payload = bytes([size % 251]) * size
            model.appended(life.writer.append([[payload]]), payload)
            life.writer.append([])
            life.writer.step()
            model.released(life.writer.synced)
            if life.failures:
                raise life.failures[0]
        model.deleted(model.safe[2][0])
        life.writer.delete_before(model.horizon)
        life.run()
        model.released(life.writer.synced)
        if life.failures:
            raise life.failures[0]
        life.writer.close()
        if life.failures:
            raise life.failures[0]


def operations_of_the_script() -> int:
    disk = SimDisk(0)
    scripted(disk, Model())
    return disk.faults.counts["any"]


@pytest.mark.parametrize("seed", range(4))
def test_the_power_may_fail_in_any_operation(seed: int) -> None:
    for nth in range(1, operations_of_the_script() + 1):
        disk, model = SimDisk(seed, Faults()), Model()
        disk.faults.lose_power(nth)
        with pytest.raises(PowerLoss):
            scripted(disk, model)
        disk.crash()
        model.check(Life(disk), None)
        disk.crash()
        model.check(Life(disk), None)


@pytest.mark.parametrize("ending", ["kill", "crash"])
def test_any_operation_may_fail(ending: str) -> None:
    for nth in range(1, operations_of_the_script() + 1):
        disk, model = SimDisk(nth, Faults()), Model()
        disk.faults.fail("any", nth)
        try:
            scripted(disk, model)
        except StorageError:
            disk.kill() if ending == "kill" else disk.crash()
        model.check(Life(disk), None)
        disk.crash()
        model.check(Life(disk), None)
