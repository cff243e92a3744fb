"""The histories of clients: what they wrote down before a kill is what counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.verify.history import HistoryWriter, load
from semel.verify.ledger import Ledger, Outcome
from semel.verify.plan import Part

PLACE = ("topic", 3)
SOURCE = ("a:topic", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1-1.history"


def loaded(path: Path) -> Ledger:
    ledger = Ledger()
    load(path, ledger)
    return ledger


def test_a_unit_is_read_as_it_was_written(path: Path) -> None:
    history = HistoryWriter(path)
    history.begins(7, "stage-1.1")
    history.sends(7, [(PLACE, None), (PLACE, (SOURCE, 12))])
    history.moves_group(7, "group", SOURCE, 13)
    history.commits(7)
    history.committed(7)
    unit = loaded(path).units[7]
    assert unit.outcome is Outcome.COMMITTED
    assert [record.value for record in unit.records] == [b"7/0", b"7/1"]
    assert [record.place for record in unit.records] == [PLACE, PLACE]
    assert unit.records[1].source == (SOURCE, 12)
    assert unit.read_to == ("group", SOURCE, 13)


def test_without_a_commit_sent_it_is_aborted_and_with_one_it_is_unknown(path: Path) -> None:
    history = HistoryWriter(path)
    history.begins(1, "producer-1.1")
    history.begins(2, "producer-1.1")
    history.commits(2)
    units = loaded(path).units
    assert units[1].outcome is Outcome.ABORTED
    assert units[2].outcome is Outcome.MAYBE


def test_a_torn_last_line_does_not_count(path: Path) -> None:
    history = HistoryWriter(path)
    history.begins(1, "producer-1.1")
    history.commits(1)
    whole = path.read_text()
    path.write_text(whole[:-1])
    assert loaded(path).units[1].outcome is Outcome.ABORTED


def test_no_two_processes_number_their_units_alike() -> None:
    parts = [
        Part("", "producer", worker, life, "", "", [0], "", "", 2, 0.0, "", 0)
        for worker in range(3)
        for life in range(1, 4)
    ]
    assert len({part.first_unit for part in parts}) == len(parts)
    assert Part.loads(parts[0].dumps()) == parts[0]
