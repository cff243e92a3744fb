"""The state of one partition's deliveries, without clock and I/O: what is acknowledged, out, waiting, next.

Rules:

- Records are admitted in offset order, while there is room: at most `max_in_flight` unacknowledged ones, none
  `SPAN_OFFSETS` above the committed offset, and never more ranges than an entry can hold. The lowest
  unacknowledged record always has room, so that a full entry gets emptier.
- The records of a key form a lane. Only the first of a lane is dealt; it leaves the lane when acknowledged.
  Records without a key have no lane.
- A batch may hold several records of one lane, in order. A record that has failed is dealt alone.
- While there are suspects (see `entry`), one record is out at a time, and an entry must say so before.
  The owner asks `must_mark`. This ends when every suspect has come back once *and* an entry that names no
  suspects is committed: only then may a crash be blamed on many again.
- Acknowledgements count when decided: `entry(also)` is what to commit for some, `acknowledge` when it is so.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from semel.subscriptions.ackset import AckSet
from semel.subscriptions.entry import MAX_RANGES, SPAN_OFFSETS, Entry, Mark
from semel.wire.batch import NO_TIMESTAMP
from semel.wire.records import NO_OFFSET, Headers, Record

NOT_DUE: Final = 0


class Held(Record):
    """A record that was admitted and is not acknowledged, and what is known of it. One object, not two."""

    __slots__ = (
        "_transformed",
        "attempts",
        "cause",
        "due_ms",
        "is_alone",
        "is_marked",
        "is_out",
        "is_suspect",
        "is_uncleared",
    )

    def __init__(
        self,
        key: bytes | None,
        value: bytes | None,
        timestamp: int = NO_TIMESTAMP,
        headers: Headers = (),
        offset: int = NO_OFFSET,
    ) -> None:
        # As in `Record`, without a call for each.
        self.key = key
        self.value = value
        self.timestamp = timestamp
        self.headers = headers
        self.offset = offset
        self._transformed: Record | None = None
        self.attempts = 0  # that failed for certain
        self.cause = ""
        self.due_ms = NOT_DUE
        self.is_alone = False
        self.is_marked = False  # the entry says, or will say, that it is out alone
        self.is_out = False
        self.is_suspect = False  # it may have been seen by a process that died
        self.is_uncleared = False  # it has not come back alive yet

    @property
    def shown(self) -> Record:
        """As the program sees it."""
        return self if self._transformed is None else self._transformed

    def show(self, record: Record) -> None:
        """What the program sees instead."""
        # If it were itself, it would hold on to itself for ever.
        self._transformed = None if record is self else record

    @property
    def attempt(self) -> int:
        """Which attempt the next one is, as far as anybody knows."""
        return self.attempts + 1 + self.is_suspect


class Window:
    """One partition, from the entry that its owner found."""

    def __init__(self, entry: Entry, max_in_flight: int, max_attempts: int) -> None:
        self.max_in_flight = max_in_flight
        self.max_attempts = max_attempts
        self._acks = AckSet(entry.offset, entry.acknowledged)
        self._next_offset = entry.offset  # where admission goes on
        # No record beyond was acknowledged before it is admitted.
        self._acknowledged_end = max((end for _, end in entry.acknowledged), default=entry.offset)
        self._held: dict[int, Held] = {}
        self._lanes: dict[bytes, deque[Held]] = {}
        self._ready: list[int] = []  # a heap of offsets: of plain numbers, since every record passes it
        self._delayed: list[tuple[int, int]] = []  # (when it is due, offset)
        self._blamed: dict[int, Held] = {}  # those that have failed, or are out alone: few, if any
        self._out = 0
        self._charged: deque[Mark] = deque(entry.marks)  # of records that are not admitted yet
        self._suspect_end = entry.suspect_end
        self._suspects_due = entry.max_in_flight  # how many can have been out when the last owner died
        self._uncleared = 0
        self._committed_offset = entry.offset
        self._committed_suspects = entry.suspect_end is not None

    # What there is

    @property
    def low(self) -> int:
        """The lowest offset that is not acknowledged."""
        return self._acks.low

    @property
    def next_offset(self) -> int:
        """Everything below was admitted, or holds nothing."""
        return self._next_offset

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def out_count(self) -> int:
        return self._out

    @property
    def committed_offset(self) -> int:
        """The offset of the entry that a new owner would find."""
        return self._committed_offset

    def waiting_count(self, now_ms: int) -> int:
        """How many could be dealt in batches: held, not out, and not waiting for their time."""
        self._wake(now_ms)
        return len(self._held) - self._out - len(self._delayed)

    @property
    def must_mark(self) -> bool:
        """Whether an entry has to say which record is out, before it is."""
        return self._suspect_end is not None or self._committed_suspects

    def next_due_ms(self) -> int | None:
        """When the next delayed record may be dealt."""
        return self._delayed[0][0] if self._delayed else None

    # Admission

    def has_room(self, offset: int) -> bool:
        held = len(self._held)
        if held >= self.max_in_flight or offset >= self._committed_offset + SPAN_OFFSETS:
            return False
        # Each record held can become a range, and its acknowledgement one more.
        return not held or len(self._acks) + len(self._charged) + 2 * (held + 1) <= MAX_RANGES

    def needs_commit(self, offset: int) -> bool:
        """Whether only the committed offset, which could be higher, keeps a record out."""
        return not self._held and offset >= self._committed_offset + SPAN_OFFSETS

    def skip_to(self, offset: int) -> None:
        """No record that could be dealt lies between the last one admitted and this offset."""
        if offset <= self._next_offset:
            return
        self._acks.add(self._next_offset, offset)
        self._next_offset = offset
        while self._charged and self._charged[0].end <= offset:
            self._charged.popleft()
        self._end_suspicion()

    def admit(self, held: Held) -> bool:
        """Takes the next record of the log; False if it was acknowledged before."""
        offset = held.offset
        if offset > self._next_offset:
            self.skip_to(offset)
        self._next_offset = offset + 1
        attempts = self._charge(offset) if self._charged else 0
        if offset < self._acknowledged_end and offset in self._acks:
            self._end_suspicion()
            return False
        self._held[offset] = held
        if attempts:
            held.attempts = attempts
            held.is_alone = True
            self._blamed[offset] = held
        if self._suspect_end is not None and self._is_suspect(offset):
            held.is_suspect = held.is_uncleared = held.is_alone = True
            self._uncleared += 1
        if held.key is None:
            heapq.heappush(self._ready, offset)
        else:
            self._lanes.setdefault(held.key, deque()).append(held)
            self._enqueue(held)
        if self._suspect_end is not None:
            self._end_suspicion()
        return True

    def _charge(self, offset: int) -> int:
        while self._charged and self._charged[0].end <= offset:
            self._charged.popleft()
        if not self._charged or self._charged[0].start > offset:
            return 0
        mark = self._charged[0]
        if mark.end == offset + 1:
            self._charged.popleft()
        else:
            self._charged[0] = mark._replace(start=offset + 1)
        return mark.attempts

    def _is_suspect(self, offset: int) -> bool:
        if self._suspect_end is None or offset >= self._suspect_end:
            return False
        if not self._suspects_due:
            self._suspect_end = offset
            return False
        self._suspects_due -= 1
        return True

    def _end_suspicion(self) -> None:
        if (
            self._suspect_end is not None
            and self._uncleared == 0
            and (self._next_offset >= self._suspect_end or not self._suspects_due)
        ):
            self._suspect_end = None

    # Dealing

    def take(self, limit: int, now_ms: int) -> list[Held]:
        """The next records to deal, in offset order, at most `limit`; none if nothing may go out now."""
        self._wake(now_ms)
        if not self._ready or (self.must_mark and self._out):
            return []
        first = self._held[heapq.heappop(self._ready)]
        if self.must_mark:
            first.is_marked = True
            self._blamed[first.offset] = first
        taken = [first]
        if limit > 1 and not (first.is_alone or first.is_marked):
            self._take_more(taken, limit)
        for held in taken:
            held.is_out = True
        self._out += len(taken)
        return taken

    def _take_more(self, taken: list[Held], limit: int) -> None:
        """Fills a batch from what is ready, and from what is next in the lanes of its own records."""
        all_held, ready = self._held, self._ready
        behind: list[int] = []
        places: dict[bytes, int] = {}
        self._push_next_of_lane(taken[0], places, behind)
        while len(taken) < limit:
            if behind and (not ready or behind[0] < ready[0]):
                held = all_held[heapq.heappop(behind)]
            elif ready and not all_held[ready[0]].is_alone:
                held = all_held[heapq.heappop(ready)]
            else:
                return
            taken.append(held)
            if held.key is not None:
                self._push_next_of_lane(held, places, behind)

    def _push_next_of_lane(self, held: Held, places: dict[bytes, int], behind: list[int]) -> None:
        key = held.key
        if key is None:
            return
        place = places[key] = places.get(key, 0) + 1
        lane = self._lanes[key]
        if place < len(lane) and not lane[place].is_alone:
            heapq.heappush(behind, lane[place].offset)

    def _wake(self, now_ms: int) -> None:
        while self._delayed and self._delayed[0][0] <= now_ms:
            heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])

    def _enqueue(self, held: Held) -> None:
        """A record may be dealt, at its time, if it is the first of its lane."""
        key = held.key
        if key is not None and self._lanes[key][0] is not held:
            return
        if held.due_ms == NOT_DUE:
            heapq.heappush(self._ready, held.offset)
        else:
            heapq.heappush(self._delayed, (held.due_ms, held.offset))

    # Coming back

    def acknowledge(self, records: Sequence[Held]) -> None:
        """It is decided that these are acknowledged."""
        for held in records:
            self._come_back(held)
            del self._held[held.offset]
            if held.key is not None:
                self._leave_lane(held.key, held)
        if self._blamed:
            for held in records:
                self._blamed.pop(held.offset, None)
        for start, end in _runs(records):
            self._acks.add(start, end)
        self._end_suspicion()

    def _leave_lane(self, key: bytes, held: Held) -> None:
        lane = self._lanes[key]
        was_first = lane[0] is held
        lane.remove(held)
        if not lane:
            del self._lanes[key]
        elif was_first and not lane[0].is_out:
            self._enqueue(lane[0])

    def fail(self, records: Sequence[Held], cause: str) -> None:
        """An attempt has failed: it counts, but a failure that several share is nobody's last."""
        for held in records:
            limit = self.max_attempts - (len(records) > 1)
            if held.attempts < limit:
                held.attempts += 1
            held.cause = cause
            held.is_alone = True
            self._blamed[held.offset] = held

    def give_back(self, records: Sequence[Held], due_ms: int) -> None:
        """Records come back and are dealt again at that time (NOT_DUE: as soon as possible)."""
        for held in records:
            self._come_back(held)
            held.due_ms = due_ms
        for held in records:
            self._enqueue(held)
        self._end_suspicion()

    def _come_back(self, held: Held) -> None:
        if held.is_out:
            held.is_out = False
            self._out -= 1
        held.is_marked = False
        if held.is_uncleared:
            held.is_uncleared = False
            self._uncleared -= 1

    # The entry

    def entry(self, also: Sequence[Held], slots: int, *, is_released: bool = False) -> Entry:
        """What to commit: all that is decided, and these as acknowledged."""
        acks = self._acks.copy() if also else self._acks
        for start, end in _runs(also):
            acks.add(start, end)
        leaving = {held.offset for held in also} if self._blamed else set()
        marks = [
            Mark(held.offset, held.offset + 1, held.attempts, held.is_marked)
            for _, held in sorted(self._blamed.items())
            if (held.attempts or held.is_marked) and held.offset not in leaving
        ]
        return Entry(
            offset=acks.low,
            acknowledged=tuple(acks.runs()),
            marks=(*marks, *self._charged),
            slots=slots,
            max_in_flight=self.max_in_flight,
            is_released=is_released,
            suspect_end=self._suspect_end,
        )

    def committed(self, entry: Entry) -> None:
        """This entry is what a new owner would find."""
        self._committed_offset = entry.offset
        self._committed_suspects = entry.suspect_end is not None and entry.suspect_end > entry.offset


def _runs(records: Sequence[Held]) -> Iterator[tuple[int, int]]:
    """The offsets of records as ranges: a batch is few of them."""
    start = end = -1
    for held in records:
        if held.offset != end:
            if start >= 0:
                yield start, end
            start = held.offset
        end = held.offset + 1
    if start >= 0:
        yield start, end
