"""What the journal's tests share: a broker's life on a simulated disk, reduced to its journal."""

import random
from pathlib import Path

from semel.journal.chain import Chain
from semel.journal.files import JournalName
from semel.journal.format import FileHeader, Seal, encode_file_header, encode_group
from semel.journal.generation import begin_generation
from semel.journal.settings import Durability, JournalSettings
from semel.journal.writer import JournalWriter
from semel.testing.simdisk import SimDisk

DIRECTORY = Path("/journal")
FILE_BYTES = 32 * 1024


class Life:
    """From the opening of the journal to the next crash, kill, close or failure. The test is the thread."""

    def __init__(
        self,
        disk: SimDisk,
        *,
        limit: int | None = None,
        synced: int = 0,
        durability: Durability = "fsync",
        file_bytes: int = FILE_BYTES,
        salt: int | None = None,
    ) -> None:
        disk.mkdir(DIRECTORY)
        settings = JournalSettings(durability=durability, file_bytes=file_bytes)
        self.disk = disk
        self.opened = Chain.open(disk, DIRECTORY, limit=limit, synced=synced)
        # A different salt for each life, as in a broker, and the same one in each run of a test.
        own_salt = random.Random(disk.faults.counts["any"]).getrandbits(64) if salt is None else salt
        generation = begin_generation(disk, DIRECTORY, self.opened, settings, salt=own_salt)
        self.chain = generation.chain
        self.attachments: list[object] = []
        self.released: list[int] = []
        self.failures: list[BaseException] = []
        self.believed = -1
        self.segment_error: Exception | None = None
        self.writer = JournalWriter(
            disk,
            DIRECTORY,
            generation,
            settings,
            after_sync=self._after_sync,
            on_released=self.released.append,
            on_failure=self._on_failure,
        )

    def found(self, from_position: int | None = None) -> list[bytes]:
        """The entries that were there when this life began."""
        return [entry for _, entry in self.found_at(from_position)]

    def found_at(self, from_position: int | None = None) -> list[tuple[int, bytes]]:
        """The same with the positions where their groups end."""
        start = self.chain.start if from_position is None else from_position
        return [(group.end, bytes(entry)) for group in self.chain.groups(start) for entry in group.entries]

    def write(self, *payloads: bytes, sync: bool = False) -> int:
        """Append each payload as a group, and run cycles until nothing is queued."""
        for payload in payloads:
            self.writer.append([[payload]], sync=sync)
        self.run()
        return self.writer.end

    def run(self) -> None:
        while self.writer.step():
            pass

    def recover(self, **options: object) -> "Life":
        """Go on in the same process after a failed write."""
        assert self.failures
        return Life(self.disk, limit=self.believed, synced=self.writer.synced, **options)  # type: ignore[arg-type]

    def _after_sync(self, attachments: list[object]) -> None:
        if self.segment_error is not None:
            raise self.segment_error
        self.attachments += attachments

    def _on_failure(self, error: BaseException, believed: int) -> None:
        self.failures.append(error)
        self.believed = believed


def journal_files(disk: SimDisk) -> list[Path]:
    return [DIRECTORY / name for name in disk.listdir(DIRECTORY) if name.endswith(".journal")]


def written_file(
    groups: list[tuple[int, list[bytes]]], *, generation: int = 1, base: int = 0, salt: int = 0x5EED_0F_A_5EA1
) -> tuple[str, bytes, list[int]]:
    """A journal file as bytes: its name, its content, and where its groups begin and end. A group is given as
    how far behind its own position its claim lies, and its entries."""
    seal = Seal(generation, salt)
    content = bytearray(encode_file_header(FileHeader(seal, base, base)))
    position = base
    bounds = [base]
    for lag, entries in groups:
        buffers, size = encode_group(
            seal, position, max(base, position - lag), [[entry] for entry in entries]
        )
        content += b"".join(buffers)
        position += size
        bounds.append(position)
    return str(JournalName(generation, base)), bytes(content), bounds


def disk_with(*files: tuple[str, bytes], seed: int = 0) -> SimDisk:
    disk = SimDisk(seed)
    disk.mkdir(DIRECTORY)
    for name, content in files:
        disk.put(DIRECTORY / name, content)
    return disk
