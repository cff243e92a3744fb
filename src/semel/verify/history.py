"""What a client did, written down before it did it: one line an event, so that kill -9 loses no fact.

    B number client             a unit begins
    R number place [source]     the next record of it will be sent; the input record that it was made from
    G number group place offset the offset of a group is part of it
    C number                    its commit will be sent
    K number                    the commit was accepted
    A number                    no commit was sent and none will be, or the broker said that it never will be

A unit that ends with C has an outcome that its client does not know. One that ends before never had a commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from semel.verify.ledger import Ledger, Outcome, Place, Violation


class HistoryWriter:
    """Appends events. Each call is one write to the operating system, which outlives the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begins(self, number: int, client: str) -> None:
        self._write(f"B {number} {client}\n")

    def sends(self, number: int, records: Iterable[tuple[Place, tuple[Place, int] | None]]) -> None:
        self._write("".join(f"R {number} {_place(place)}{_source(source)}\n" for place, source in records))

    def moves_group(self, number: int, group: str, place: Place, offset: int) -> None:
        self._write(f"G {number} {group} {_place(place)} {offset}\n")

    def commits(self, number: int) -> None:
        self._write(f"C {number}\n")

    def committed(self, number: int) -> None:
        self._write(f"K {number}\n")

    def aborted(self, number: int) -> None:
        self._write(f"A {number}\n")

    def _write(self, lines: str) -> None:
        os.write(self._file, lines.encode())

    def close(self) -> None:
        os.close(self._file)


def load(path: Path, ledger: Ledger) -> None:
    """Add the events of one client's process, which has ended, to the facts."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # The last one may be torn; then what it announces was not done.
            _add(line.split(), ledger)
    for unit in ledger.units.values():
        if unit.outcome is Outcome.OPEN:
            ledger.aborted(unit)


def _add(words: list[str], ledger: Ledger) -> None:
    kind, number = words[0], int(words[1])
    if kind == "B":
        ledger.begin(words[2], number)
        return
    unit = ledger.units[number]
    match kind:
        case "R":
            source = (_parse(words[3]), int(words[4])) if len(words) > 3 else None
            unit.add(_parse(words[2]), source)
        case "G":
            unit.read_to = (words[2], _parse(words[3]), int(words[4]))
        case "C":
            unit.outcome = Outcome.MAYBE
        case "K":
            ledger.committed(unit)
        case "A":
            ledger.aborted(unit)
        case _:
            raise Violation(f"a history holds {words}, which nobody wrote")


def _place(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _parse(text: str) -> Place:
    topic, _, partition = text.rpartition(":")
    return topic, int(partition)


def _source(source: tuple[Place, int] | None) -> str:
    return "" if source is None else f" {_place(source[0])} {source[1]}"
