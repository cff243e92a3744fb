"""The facts that a broker may never take back: what clients wrote and were told, and what readers saw.

Everything is proved from content. Each record says which *unit* it belongs to (a transaction, or one batch of
an idempotent producer) and which of its records it is. From the client's side a unit is

    open        nothing was decided: no reader may see it
    maybe       its commit was sent, the answer is not known: all of it or nothing, and that for ever
    committed   the broker said so: all of it is there, for ever
    aborted     no commit was ever sent, or the only one was refused: no reader may see it, ever

Readers add facts: what was at an offset stays there, the ends of a log never move back, one record of a unit
that was seen makes the whole unit committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Place = tuple[str, int]
"""A topic and a partition."""

NO_OFFSET = -1


class Violation(AssertionError):  # noqa: N818 - what was violated is in its text
    """The broker broke a promise; the text says which, readable without the code."""


class Outcome(Enum):
    """What a unit's client knows of its fate."""

    OPEN = "open"
    MAYBE = "maybe committed"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Sent:
    """One record that a client sent."""

    __slots__ = ("number", "offset", "place", "source", "unit")

    def __init__(self, unit: Unit, number: int, place: Place, source: tuple[Place, int] | None) -> None:
        self.unit = unit
        self.number = number
        self.place = place
        self.source = source
        """The input record that this one was made from."""
        self.offset = NO_OFFSET
        """Where the broker said it is."""

    @property
    def value(self) -> bytes:
        return b"%d/%d" % (self.unit.number, self.number)

    def __str__(self) -> str:
        return f"record {self.number} of {self.unit}"


class Unit:
    """What becomes visible at once, or never."""

    __slots__ = ("client", "number", "outcome", "read_to", "records", "was_seen")

    def __init__(self, number: int, client: str) -> None:
        self.number = number
        self.client = client
        self.outcome = Outcome.OPEN
        self.was_seen = False
        self.records: list[Sent] = []
        self.read_to: tuple[str, Place, int] | None = None
        """The group, the input partition and the offset that is committed with it."""

    def add(self, place: Place, source: tuple[Place, int] | None = None) -> Sent:
        sent = Sent(self, len(self.records), place, source)
        self.records.append(sent)
        return sent

    def __str__(self) -> str:
        return f"unit {self.number} of {self.client} ({self.outcome.value})"


@dataclass(slots=True, frozen=True)
class Ends:
    """The ends of a log, as a reader was told them."""

    start: int
    stable: int
    high: int


@dataclass(slots=True)
class Content:
    """A whole partition, as a reader finds it."""

    ends: Ends
    committed: dict[int, bytes] = field(default_factory=dict)
    """What a read_committed reader gets, by offset."""
    stored: dict[int, bytes] = field(default_factory=dict)
    """What a read_uncommitted reader gets, markers left out."""


class Ledger:
    """All facts of one run, and the rules that they must obey."""

    def __init__(self) -> None:
        self.units: dict[int, Unit] = {}
        self.ends: dict[Place, Ends] = {}
        self.seen: dict[Place, dict[int, bytes]] = {}
        self.stored: dict[Place, dict[int, bytes]] = {}
        self.group_offsets: dict[tuple[str, Place], int] = {}
        self.checks = 0

    # What clients do and are told.

    def begin(self, client: str, number: int | None = None) -> Unit:
        """A new unit. Numbers grow within a client; without one it gets the next of all."""
        unit = Unit(len(self.units) if number is None else number, client)
        self.units[unit.number] = unit
        return unit

    def acknowledged(self, sent: Sent, offset: int) -> None:
        """The record is at this offset: the broker said so, or a reader found it there."""
        if sent.offset not in (NO_OFFSET, offset):
            raise Violation(f"{sent} is at offset {sent.offset} of {name(sent.place)} and also at {offset}")
        sent.offset = offset

    def committed(self, unit: Unit) -> None:
        if unit.outcome is Outcome.ABORTED:
            raise Violation(f"{unit} was told to be committed after it was aborted")
        unit.outcome = Outcome.COMMITTED
        if unit.read_to is not None:
            group, place, offset = unit.read_to
            self.told_offset(group, place, offset)

    def aborted(self, unit: Unit) -> None:
        if unit.was_seen:
            raise Violation(f"{unit} is aborted, and a read_committed reader has seen it")
        unit.outcome = Outcome.ABORTED

    def told_offset(self, group: str, place: Place, offset: int) -> None:
        """A group's committed offset, as the broker gave it; in these runs groups only go forward."""
        known = self.group_offsets.get((group, place), 0)
        if offset < known:
            raise Violation(
                f"group {group} had the offset {known} of {name(place)} and went back to {offset}"
            )
        self.group_offsets[group, place] = offset

    # What readers see.

    def told_ends(self, place: Place, ends: Ends) -> None:
        known = self.ends.get(place)
        if known is not None:
            for what, before, now in (
                ("log start offset", known.start, ends.start),
                ("last stable offset", known.stable, ends.stable),
                ("high watermark", known.high, ends.high),
            ):
                if now < before:
                    raise Violation(f"the {what} of {name(place)} went back from {before} to {now}")
        if not ends.stable <= ends.high:
            raise Violation(f"{name(place)} is stable up to {ends.stable}, beyond its end {ends.high}")
        self.ends[place] = ends

    def saw(self, place: Place, offset: int, value: bytes) -> None:
        """A read_committed reader got this record."""
        sent = self.sent(value)
        if sent.unit.outcome in (Outcome.OPEN, Outcome.ABORTED):
            raise Violation(f"a read_committed reader of {name(place)} got {sent} at offset {offset}")
        sent.unit.was_seen = True
        self.acknowledged(sent, offset)
        _same(self.seen.setdefault(place, {}), place, offset, value, "read")

    def stored_at(self, place: Place, offset: int, value: bytes) -> None:
        """A read_uncommitted reader got this record."""
        self.acknowledged(self.sent(value), offset)
        _same(self.stored.setdefault(place, {}), place, offset, value, "read uncommitted")

    def sent(self, value: bytes) -> Sent:
        number, _, index = value.partition(b"/")
        try:
            return self.units[int(number)].records[int(index)]
        except (ValueError, IndexError, KeyError):
            raise Violation(f"a reader got {value!r}, which nobody sent") from None

    # What must hold of a broker at any moment, also of one that has just come back from a crash.

    def check(self, contents: dict[Place, Content], group_offsets: dict[tuple[str, Place], int]) -> None:
        """Hold the whole content of a broker against all facts."""
        self.checks += 1
        for place, content in contents.items():
            self._check_place(place, content)
        for unit in self.units.values():
            self._check_unit(unit, contents, group_offsets)
        for key, offset in self.group_offsets.items():
            if group_offsets.get(key, 0) < offset:
                raise Violation(
                    f"group {key[0]} had the offset {offset} of {name(key[1])}, and now has "
                    f"{group_offsets.get(key, 0)}"
                )

    def _check_place(self, place: Place, content: Content) -> None:
        known = self.ends.get(place)
        if known is not None and (
            content.ends.high < known.high
            or content.ends.stable < known.stable
            or content.ends.start < known.start
        ):
            raise Violation(f"a reader was told {known} of {name(place)}, and now it is {content.ends}")
        for facts, found in ((self.seen, content.committed), (self.stored, content.stored)):
            for offset, value in facts.get(place, {}).items():
                if offset >= content.ends.start and found.get(offset) != value:
                    raise Violation(
                        f"a reader saw {self.sent(value)} in {name(place)} at offset {offset}, and now "
                        f"there is {found.get(offset)!r}"
                    )
        self._check_order(place, content)

    def _check_order(self, place: Place, content: Content) -> None:
        """No record twice, none out of its sender's order, none elsewhere than acknowledged."""
        at: dict[bytes, int] = {}
        last: dict[str, tuple[int, int]] = {}
        for offset, value in sorted(content.stored.items()):
            sent = self.sent(value)
            if value in at:
                raise Violation(f"{sent} is in {name(place)} twice, at {at[value]} and at {offset}")
            at[value] = offset
            if sent.place != place:
                raise Violation(f"{sent} was sent to {name(sent.place)} and is in {name(place)}")
            if sent.offset not in (NO_OFFSET, offset):
                raise Violation(
                    f"{sent} was acknowledged at {sent.offset} of {name(place)} and is at {offset}"
                )
            order = (sent.unit.number, sent.number)
            if order < last.get(sent.unit.client, order):
                raise Violation(f"{sent} follows later records of its sender in {name(place)}")
            last[sent.unit.client] = order
        for offset, value in content.committed.items():
            if content.stored.get(offset) != value:
                raise Violation(f"read_committed and read_uncommitted disagree on {name(place)} at {offset}")
            if self.sent(value).unit.outcome in (Outcome.OPEN, Outcome.ABORTED):
                raise Violation(f"{self.sent(value)} can be read in {name(place)} at {offset}")

    def _check_unit(
        self,
        unit: Unit,
        contents: dict[Place, Content],
        group_offsets: dict[tuple[str, Place], int],
    ) -> None:
        shown: list[Sent] = []
        hidden: list[Sent] = []
        for sent in unit.records:
            content = contents[sent.place]
            if content.committed.get(sent.offset) == sent.value:
                shown.append(sent)
            elif sent.offset == NO_OFFSET:
                # Where nobody knows its place, it may have been deleted with the beginning of the log.
                if content.ends.start == 0:
                    hidden.append(sent)
            elif content.ends.start <= sent.offset < content.ends.stable:
                hidden.append(sent)
            elif (
                unit.outcome is Outcome.COMMITTED
                and sent.offset >= content.ends.start
                and content.stored.get(sent.offset) != sent.value
            ):
                raise Violation(f"{sent} was acknowledged at {sent.offset} of {name(sent.place)}: lost")
        must = unit.outcome is Outcome.COMMITTED or unit.was_seen or bool(shown)
        if must and hidden:
            first = hidden[0]
            why = f"{shown[0]} can be read" if shown else "its client was told, or a reader saw it"
            raise Violation(f"{first} of {name(first.place)} cannot be read: torn or lost, for {why}")
        if shown and unit.read_to is not None:
            group, place, offset = unit.read_to
            if group_offsets.get((group, place), 0) < offset:
                raise Violation(
                    f"{unit} can be read, and its group {group} is not at {offset} of {name(place)}, "
                    f"but at {group_offsets.get((group, place), 0)}"
                )

    # What must hold when everything has come to rest.

    def check_end(self, contents: dict[Place, Content], group_offsets: dict[tuple[str, Place], int]) -> None:
        """No transaction hangs, and the output of each group is what it has read, once each and in order."""
        self.check(contents, group_offsets)
        for place, content in contents.items():
            if content.ends.stable != content.ends.high:
                raise Violation(
                    f"{name(place)} is stable up to {content.ends.stable} of {content.ends.high}, "
                    "and no transaction should be open: one hangs"
                )
        visible = {value for content in contents.values() for value in content.committed.values()}
        for (group, place), offset in group_offsets.items():
            self._check_output(group, place, offset, contents[place], visible)

    def _check_output(self, group: str, place: Place, end: int, inputs: Content, visible: set[bytes]) -> None:
        made = [
            sent.source[1]
            for unit in self.units.values()
            if unit.read_to is not None and unit.read_to[:2] == (group, place)
            for sent in unit.records
            if sent.source is not None and sent.value in visible
        ]
        read = [offset for offset in sorted(inputs.committed) if offset < end]
        if sorted(made) != read:
            missing = sorted(set(read) - set(made))[:3]
            extra = sorted(offset for offset in made if offset not in read or made.count(offset) > 1)[:3]
            raise Violation(
                f"group {group} is at {end} of {name(place)}: inputs without output {missing}, "
                f"outputs without or beyond their input {extra}"
            )


def name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def _same(facts: dict[int, bytes], place: Place, offset: int, value: bytes, how: str) -> None:
    if facts.setdefault(offset, value) != value:
        raise Violation(
            f"{name(place)} was {how} at offset {offset}: first {facts[offset]!r}, then {value!r}"
        )
