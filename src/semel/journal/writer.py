"""Writing a journal: the event loop queues groups, one thread brings them to the disk.

Four positions, each at or below the one before:

    end        everything queued
    written    in the journal file, as far as the page cache goes
    released   as durable as the setting asks for, and in the segments: may be answered and shown
    synced     survives a power failure; what group headers claim as `durable`

(`released` may lag behind `synced` for a moment, while the segments are written.)

With durability `fsync` a cycle is: take all that is queued and fits the file, one write and one fdatasync (a
single system call), `after_sync` with the attachments of those groups, `on_released`. What was queued
meanwhile, by whole turns of the event loop, is the next cycle: that is the whole of group commit. With
durability `os` the fdatasync is left out, except for a group that asks for it, at the end of a file and at
close, so `synced` falls behind.

The first failure is the last. Nothing is tried again in place: the writer drops what is queued, calls
`on_failure` once, and refuses everything from then on. `on_failure` gets D, the position beyond which nothing
may be believed. To go on, open the chain with D as its limit and with `synced`, and begin a generation.

The journal ends with a claim: after a second of rest and at close, the writer adds an empty group, whose
header says that all before it was synced. Damage to the last acknowledged group is then no torn write.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from semel.disk import IOV_MAX, Buffer, Disk, write_fully
from semel.errors import StorageError
from semel.journal.files import OldFile, create_journal_file
from semel.journal.format import FileHeader, encode_group
from semel.journal.generation import Generation
from semel.journal.settings import JournalSettings

CYCLE_BYTES = 16 * 1024 * 1024
"""How much one cycle writes, unless a single group is larger: what waits behind it must not wait long."""

CLAIM_AFTER_S = 1.0
"""After this long with nothing to write, the last groups are claimed as durable."""

CLOSE_TIMEOUT_S = 60.0
"""How long `close` waits for the disk."""

Entry = Sequence[Buffer]
"""An entry is given as buffers that are joined on disk."""


class _Queued:
    """A group that waits to be written."""

    __slots__ = ("attachment", "buffers", "end", "size", "sync")

    def __init__(self, buffers: list[Buffer], size: int, end: int, sync: bool, attachment: object) -> None:
        self.buffers = buffers
        self.size = size
        self.end = end
        self.sync = sync
        self.attachment = attachment


class JournalWriter:
    """The one writer of a journal, for one generation.

    `append`, `delete_before` and the properties are for the event loop and never wait for the disk. The
    callbacks run in the writer's thread; an exception in `after_sync` counts as a failed write.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        generation: Generation,
        settings: JournalSettings,
        *,
        after_sync: Callable[[list[object]], None],
        on_released: Callable[[int], None],
        on_failure: Callable[[BaseException, int], None],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._settings = settings
        self._after_sync = after_sync
        self._on_released = on_released
        self._on_failure = on_failure

        self._head = generation.head
        self._older = deque(generation.older)
        self._spares = generation.spares
        self._spare_wanted = True

        start = generation.chain.end
        self.generation = generation.number
        self.end = start
        self.written = start
        self.released = start
        self.synced = start
        self.failure: BaseException | None = None

        self._mutex = threading.Lock()
        self._queue: deque[_Queued] = deque()
        self._offered = start
        self._after_turn: Callable[[Callable[[], None]], object] | None = None
        self._offer_due = False
        self._horizon = 0
        self._closing = False
        self._claim_due = False
        self._own_thread: threading.Thread | None = None
        # A binary semaphore: taken by the thread when it rests, given back once by whoever ends the rest.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._resting = False

    @property
    def queued_bytes(self) -> int:
        """What waits for the disk."""
        return self.end - self.released

    @property
    def congested(self) -> bool:
        """Whether so much waits for the disk that no more requests should be read."""
        return self.end - self.released > self._settings.queue_bytes

    @property
    def reserve_ready(self) -> bool:
        """Whether room for the next journal file is held. Without it, take only what frees room."""
        return len(self._spares) > 0

    # The event loop's side

    def append(self, entries: Sequence[Entry], *, sync: bool = False, attachment: object = None) -> int:
        """Queue a group and return the position of its end. The buffers must not change until it is released.

        With `sync` it is synced before it is released, whatever the durability; a group without entries
        is how to ask for that alone.
        """
        with self._mutex:
            if self.failure is not None:
                raise StorageError(f"the journal takes no more writes: {self.failure}") from self.failure
            if self._closing:
                raise StorageError("the journal takes no more writes: it was closed; start the broker again")
            end = self._enqueue(entries, sync, attachment)
            self._claim_due = True
        if self._after_turn is None:
            self._offer()
        elif not self._offer_due:
            self._offer_due = True
            self._after_turn(self._offer)
        return end

    def _offer(self) -> None:
        """Let the thread take all that is queued."""
        self._offer_due = False
        with self._mutex:
            self._offered = self.end
            wake = self._resting
            self._resting = False
        if wake:
            self._wake.release()

    def delete_before(self, horizon: int) -> None:
        """Delete the files that hold nothing at or beyond `horizon`, in the writer's own time."""
        with self._mutex:
            self._horizon = max(self._horizon, horizon)
        self.restore_reserve()

    def restore_reserve(self) -> None:
        """Try again to hold room for the next file: call it now and then while `reserve_ready` is false."""
        with self._mutex:
            self._spare_wanted = True
            wake = self._resting
            self._resting = False
        if wake:
            self._wake.release()

    def start(self, after_turn: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Run the writer in a thread.

        With `after_turn`, which calls back at the end of a turn of the event loop, all that is queued in one
        turn is offered to the thread together: else a cycle would often begin with the first group of many.
        """
        self._after_turn = after_turn
        self._own_thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._own_thread.start()

    def close(self, *, drain: bool = True) -> None:
        """Write what is queued (or drop it), sync, claim it as durable, and end. Blocks until it is done."""
        with self._mutex:
            self._closing = True
            if not drain and self._queue:
                self.end = self._queue[0].end - self._queue[0].size
                self._queue.clear()
            self._offered = self.end
            wake = self._resting
            self._resting = False
        if self._own_thread is None:
            self._finish()
            return
        if wake:
            self._wake.release()
        self._own_thread.join(CLOSE_TIMEOUT_S)
        if self._own_thread.is_alive():
            raise StorageError(
                f"the journal could not be closed within {CLOSE_TIMEOUT_S:.0f} s: the disk does not answer; "
                "what was acknowledged is safe, end the process"
            )

    def _enqueue(self, entries: Sequence[Entry], sync: bool, attachment: object) -> int:
        buffers, size = encode_group(self._head.seal, self.end, self.synced, entries)
        self.end += size
        self._queue.append(_Queued(buffers, size, self.end, sync, attachment))
        return self.end

    # The writer thread's side

    def _run(self) -> None:
        while not self._closing and self.failure is None:
            if not self.step():
                self._rest()
        self._finish()

    def _rest(self) -> None:
        """Wait until there is something to do; rest long enough, and claim what was written."""
        with self._mutex:
            is_over = self._closing or self.failure is not None
            if is_over or self._has_offer() or self._spare_wanted or self._deletable() is not None:
                return
            self._resting = True
            claim_due = self._claim_due and self.synced == self.end
        if self._wake.acquire(timeout=CLAIM_AFTER_S if claim_due else -1):
            return
        with self._mutex:
            if self._resting:
                self._resting = False
                self._enqueue_claim()
                return
        # Somebody ended the rest just now: take the semaphore that was given back.
        self._wake.acquire()

    def _enqueue_claim(self) -> None:
        self._claim_due = False
        self._offered = self._enqueue((), True, None)

    def _has_offer(self) -> bool:
        return bool(self._queue) and self._queue[0].end <= self._offered

    def step(self) -> bool:
        """Run one cycle and say whether there was anything to do. A simulation calls it; it has no thread."""
        if self.failure is not None:
            return False
        try:
            batch = self._take()
            if batch:
                self._write(batch)
            return self._tidy() or bool(batch)
        except BaseException as error:
            self._fail(error)
            return False

    def _take(self) -> list[_Queued]:
        """The queued groups that one write can take, after a roll if the next does not fit the file."""
        with self._mutex:
            if not self._has_offer():
                return []
            size = self._queue[0].size
        if self.written + size > self._head.limit:
            self._roll(size)
        room = min(self._head.limit - self.written, max(size, CYCLE_BYTES))
        batch: list[_Queued] = []
        buffers = 0
        with self._mutex:
            queue = self._queue
            while queue and queue[0].size <= room and queue[0].end <= self._offered:
                buffers += len(queue[0].buffers)
                if batch and buffers > IOV_MAX:
                    break
                group = queue.popleft()
                room -= group.size
                batch.append(group)
        return batch

    def _write(self, batch: list[_Queued]) -> None:
        buffers: list[Buffer] = []
        attachments: list[object] = []
        fsync = self._settings.durability == "fsync"
        sync = False
        for group in batch:
            buffers += group.buffers
            sync = sync or group.sync
            if group.attachment is not None:
                attachments.append(group.attachment)
        head = self._head
        write_fully(head.file, buffers, head.offset(self.written), sync=fsync)
        end = batch[-1].end
        self.written = end
        if sync and not fsync:
            head.file.fdatasync()
        if sync or fsync:
            self.synced = end
        if attachments:
            self._after_sync(attachments)
        self.released = end
        self._on_released(end)

    def _roll(self, size: int) -> None:
        """Go on in a new file, with room for `size` bytes at least."""
        old = self._head
        if self.synced < self.written:
            old.file.fdatasync()
            self.synced = self.written
        header = FileHeader(old.seal, self.written, self.written)
        self._head = create_journal_file(self._disk, self._directory, self._spares, header, (), size)
        old.file.close()
        with self._mutex:
            self._spare_wanted = True
            # An empty file has the same base, so the same name: it was not followed but replaced.
            if old.base < self.written:
                self._older.append(OldFile(old.file.path, self.written))

    def _tidy(self) -> bool:
        """Delete one file that is no longer needed, or see to the spare; say whether a file was deleted."""
        with self._mutex:
            deletable = self._deletable()
            spare_wanted = self._spare_wanted
            self._spare_wanted = False
        if deletable is not None:
            self._delete(deletable)
            return True
        if spare_wanted:
            try:
                self._spares.hold()
            except StorageError:
                # Not a failed write: it shows in `reserve_ready`, and is tried again when room was made.
                return False
        return False

    def _deletable(self) -> OldFile | None:
        if self._older and self._older[0].end <= self._horizon:
            return self._older[0]
        return None

    def _delete(self, old: OldFile) -> None:
        # Oldest first, each made durable before the next: a newer file that vanished before an older one
        # would leave a gap, and bring back what it had made void.
        if not self._spares.keep(old.path):
            self._disk.unlink(old.path)
        self._disk.fsync_dir(self._directory)
        with self._mutex:
            self._older.popleft()

    def _finish(self) -> None:
        """Write what is left, claim it, and let go of the file."""
        while self.step():
            pass
        if self._has_failed():
            return
        try:
            if self.synced < self.written:
                self._head.file.fdatasync()
                self.synced = self.written
            if self._claim_due:
                with self._mutex:
                    self._enqueue_claim()
                while self.step():
                    pass
            if not self._has_failed():
                self._head.file.truncate(self._head.offset(self.written))
                self._head.file.close()
        except BaseException as error:
            self._fail(error)

    def _has_failed(self) -> bool:
        # By a call: of an attribute mypy, and mypyc with it, would believe what an earlier look has shown.
        return self.failure is not None

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            self.failure = error
            self._queue.clear()
        with suppress(OSError, StorageError):  # of a file that has failed already
            self._head.file.close()
        # With `fsync` this is `synced`. With `os` nobody was promised more than the page cache, and it still
        # has these bytes: beginning a generation copies them and checks each group, so it trusts none.
        self._on_failure(error, self.written)
