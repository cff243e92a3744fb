"""One life of the broker's state: from a recovery until the disk fails or the process ends.

A request is decided on the applied state; its entries are applied and queued in the journal at once, so
that the next request is decided on them. Its answer, and everything that readers may see of it, waits until
the journal has released its position. An answer that changes nothing waits for all that it was decided on:
a refusal must not rest on something that a crash could still undo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from semel.broker.core import Appended, Broker, Dropped, Effect, StartMoved
from semel.broker.decision import Decision, Parked, Waiter
from semel.broker.entries import encode_entry
from semel.broker.topics import Partition
from semel.disk import Buffer
from semel.errors import StorageError
from semel.server.metrics import Metrics
from semel.storage.partition import Placement
from semel.storage.store import Store
from semel.wire.frames import Message


class Journal(Protocol):
    """What a life needs of the journal."""

    @property
    def end(self) -> int: ...

    @property
    def released(self) -> int:
        """Everything up to here may be shown."""

    def append(
        self, entries: list[list[Buffer]], *, sync: bool = False, attachment: object = None
    ) -> int: ...


class Job(Protocol):
    """Work on files that must not keep the event loop."""

    def run(self) -> None: ...


class Waiting:
    """Answers, and what becomes visible with them, at a position of the journal."""

    __slots__ = ("answers", "committed_at_s", "effects", "position")

    def __init__(
        self, position: int, answers: list[tuple[Waiter, Message | None]], effects: list[Effect]
    ) -> None:
        self.committed_at_s = 0.0
        """When a commit was decided, if this is one."""
        self.position = position
        self.answers = answers
        self.effects = effects


class Life:
    """The state with its journal and its segments."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        journal: Journal,
        in_background: Callable[[Job], None],
        metrics: Metrics | None = None,
    ) -> None:
        self.broker = broker
        self.store = store
        self.journal = journal
        self.waiting: deque[Waiting] = deque()
        self.shown = journal.released
        """Everything up to here is visible. The journal's own thread may be further already."""
        self.is_over = False
        """The disk has failed; readers go on until there is a successor."""
        self.dirty: dict[Partition, int] = {}
        """Partitions with batches that are not flushed: where in the journal the first of them may lie."""
        self._is_torn = False
        """Something was applied that the journal did not take: nothing may be answered from this state."""
        self.snapshot_at = journal.end
        """Up to where the newest snapshot reaches."""
        self._in_background = in_background
        self._metrics = metrics or Metrics()
        self._watchers: dict[Partition, set[Callable[[], None]]] = {}

    # Deciding to releasing.

    def submit(self, waiter: Waiter | None, decision: Decision) -> None:
        """Apply and journal what was decided, and answer when that is durable.

        Raises StorageError if the journal has failed, and from then on for everything: a retry of what was
        applied and not journaled would be taken for a duplicate, and acknowledged.
        """
        if self._is_torn:
            raise StorageError("the journal takes no more writes; the broker recovers, try again")
        answers = _answers(waiter, decision)
        if decision.entries or decision.sync:
            effects: list[Effect] = []
            placements: list[Placement] = []
            encoded = []
            commits = self._metrics.deciding(self.broker, decision.entries)
            sync = decision.sync
            for entry in decision.entries:
                effect = self.broker.apply(entry)
                encoded.append(encode_entry(entry))
                if effect is not None:
                    effects.append(effect)
                    if isinstance(effect, Appended):
                        placements.append(self._place(effect))
                    else:
                        sync = True  # Files are deleted for it.
            self._is_torn = True
            position = self.journal.append(encoded, sync=sync, attachment=placements)
            self._is_torn = False
            waiting = Waiting(position, answers, effects)
            if commits:
                waiting.committed_at_s = perf_counter()
            self.waiting.append(waiting)
        elif self.waiting:
            self.waiting.append(Waiting(self.journal.end, answers, []))
        else:
            for answered, reply in answers:
                answered.answer(reply)
            return
        if self.journal.released >= self.waiting[0].position:
            self.release(self.journal.released)

    def _place(self, effect: Appended) -> Placement:
        partition = effect.partition
        entry = effect.batch_entry
        view = self.store.partition(entry.topic_id, entry.index)
        if partition not in self.dirty:
            self.dirty[partition] = self.journal.end
        return view.append(
            entry.batch, entry.header, settings=partition.topic.settings.log, aborted=effect.aborted
        )

    def release(self, position: int) -> None:
        """The journal has released everything up to `position`: show it, and answer."""
        self.shown = max(self.shown, position)
        waiting = self.waiting
        while waiting and waiting[0].position <= position:
            released = waiting.popleft()
            for effect in released.effects:
                self._show(effect)
            if released.committed_at_s:
                self._metrics.commit_latency.add(perf_counter() - released.committed_at_s)
            for waiter, reply in released.answers:
                waiter.answer(reply)

    def end(self, released: int, durable: int) -> None:
        """The disk has failed. Show what was released, answer what is durable, and refuse the rest.

        What is durable but not released is in the journal, perhaps not in a segment: the next life shows it.
        """
        self.release(released)
        self.is_over = True
        waiting, self.waiting = self.waiting, deque()
        for left in waiting:
            for waiter, reply in left.answers:
                if left.position <= durable:
                    waiter.answer(reply)
                else:
                    waiter.refuse()

    def _show(self, effect: Effect) -> None:
        match effect:
            case Appended():
                self._show_append(effect)
            case StartMoved():
                self._show_start(effect)
            case Dropped():
                self._show_drop(effect)

    def _show_append(self, effect: Appended) -> None:
        partition = effect.partition
        end_offset = effect.batch_entry.header.last_offset + 1
        partition.log.reveal(end_offset)
        if effect.ended_first_offset >= 0:
            partition.log.reveal_end(effect.ended_first_offset)
        self.store.partition(effect.batch_entry.topic_id, effect.batch_entry.index).reveal(end_offset)
        self._wake(partition)

    def _show_start(self, effect: StartMoved) -> None:
        partition = effect.partition
        partition.log.reveal_start(effect.log_start_offset)
        view = self.store.partition(partition.topic.topic_id, partition.index)
        self._in_background(view.delete_below(effect.log_start_offset))
        self._wake(partition)

    def _show_drop(self, effect: Dropped) -> None:
        for partition in effect.topic.partitions:
            self.dirty.pop(partition, None)
            self._wake(partition)
        self._in_background(self.store.drop_topic(effect.topic.topic_id))

    # Waiting for news of a partition.

    def watch(self, partition: Partition, wake: Callable[[], None]) -> None:
        """Call `wake` when there is something new to see in `partition`."""
        self._watchers.setdefault(partition, set()).add(wake)

    def unwatch(self, partition: Partition, wake: Callable[[], None]) -> None:
        watchers = self._watchers.get(partition)
        if watchers is not None:
            watchers.discard(wake)
            if not watchers:
                del self._watchers[partition]

    def wake_all(self) -> None:
        for partition in tuple(self._watchers):
            self._wake(partition)

    def _wake(self, partition: Partition) -> None:
        watchers = self._watchers.get(partition)
        if watchers is not None:
            for wake in tuple(watchers):
                wake()


def _answers(waiter: Waiter | None, decision: Decision) -> list[tuple[Waiter, Message | None]]:
    answers: list[tuple[Waiter, Message | None]] = list(decision.others)
    if waiter is not None and not isinstance(decision.reply, Parked):
        answers.append((waiter, decision.reply))
    return answers
