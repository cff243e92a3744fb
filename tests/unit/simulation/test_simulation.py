"""Whole brokers under simulated clock, network and disk; the faults that the simulation must find."""

from __future__ import annotations

import os

import pytest

from semel.errors import ConfigError
from semel.server.planted import FAULTS, NO_FAULT, check_allowed
from semel.simulate.campaign import play_seeds
from semel.simulate.exhaustive import PAIRS, Pair, Scope, explore
from semel.simulate.run import Failure, Tally, play
from semel.verify.ledger import Content, Ends, Ledger, Outcome, Unit, Violation

SEEDS = int(os.environ.get("TEST_SIMULATION_SEEDS", "25"))
"""How many seeds; `script/test` asks for more, and `semel simulate` plays thousands."""
SEEDS_FOR_A_FAULT = 20
DEPTH = 4

PLACE = ("log", 0)
OTHER = ("log", 1)


def test_no_seed_breaks_a_promise() -> None:
    total, failures = Tally(), list[Failure]()
    for tally, failed in play_seeds(range(SEEDS)):
        total.add(tally)
        failures += failed
    assert not failures, failures[0]
    # A simulation in which nothing happens would hold, too.
    assert total.committed > 4 * SEEDS
    assert total.aborted > SEEDS
    assert total.crashes > SEEDS
    assert total.recoveries > SEEDS // 5


async def test_a_seed_replays_exactly() -> None:
    assert await play(7) == await play(7)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_a_planted_fault(fault: str) -> None:
    found = (
        failure
        for seed in range(SEEDS_FOR_A_FAULT)
        for _, failed in play_seeds(range(seed, seed + 1), fault=fault)
        for failure in failed
    )
    failure = next(found, None)
    assert failure is not None
    assert "Error:" not in failure.text, "found as a broken promise, not a crash"


@pytest.mark.parametrize("clients", PAIRS, ids=lambda pair: pair.name)
def test_every_interleaving_of_a_small_scope_holds(clients: Pair) -> None:
    found = explore(Scope(DEPTH, clients))
    assert not found.violation, found.path
    assert found.states > 350
    assert found.crashes > 100


@pytest.mark.parametrize("fault", FAULTS)
def test_the_small_scope_is_large_enough_for_a_planted_fault(fault: str) -> None:
    assert explore(Scope(DEPTH + 1, fault=fault)).violation


def test_the_small_scope_of_old_clients_finds_a_planted_fault() -> None:
    # The others take longer paths with version 1: each partition is added before it is written to.
    assert explore(Scope(DEPTH, PAIRS[-1], fault="lose-dedup")).violation


def test_nobody_gets_a_broken_broker_by_accident() -> None:
    check_allowed(NO_FAULT, {})
    check_allowed(FAULTS[0], {"SEMEL_TESTING": "1"})
    with pytest.raises(ConfigError, match="SEMEL_TESTING=1"):
        check_allowed(FAULTS[0], {"SEMEL_TESTING": "0"})


# What the ledger accepts and refuses.


def committed_unit(ledger: Ledger) -> Unit:
    """A committed transaction with a record in each of two partitions."""
    unit = ledger.begin("client.1")
    for place in (PLACE, OTHER):
        ledger.acknowledged(unit.add(place), 0)
    unit.outcome = Outcome.MAYBE
    ledger.committed(unit)
    return unit


def content(*values: bytes, stable: int = 10, high: int = 10) -> Content:
    """A partition that holds these values from offset 0 on, all of them committed."""
    stored = dict(enumerate(values))
    return Content(Ends(0, stable, high), dict(stored), stored)


def test_a_committed_unit_that_is_there_is_accepted() -> None:
    ledger = Ledger()
    committed_unit(ledger)
    ledger.check_end({PLACE: content(b"0/0"), OTHER: content(b"0/1")}, {})


def test_a_committed_record_that_is_missing_is_a_violation() -> None:
    ledger = Ledger()
    committed_unit(ledger)
    with pytest.raises(Violation, match="torn or lost"):
        ledger.check({PLACE: content(b"0/0"), OTHER: content()}, {})


def test_half_of_a_unit_that_nobody_knows_of_is_a_violation() -> None:
    ledger = Ledger()
    unit = committed_unit(ledger)
    unit.outcome = Outcome.MAYBE
    ledger.check({PLACE: content(), OTHER: content()}, {})
    with pytest.raises(Violation, match="torn or lost"):
        ledger.check({PLACE: content(), OTHER: content(b"0/1")}, {})


def test_a_record_twice_is_a_violation() -> None:
    ledger = Ledger()
    unit = ledger.begin("client.1")
    unit.add(PLACE)
    unit.outcome = Outcome.MAYBE
    with pytest.raises(Violation, match="twice"):
        ledger.check({PLACE: content(b"0/0", b"0/0")}, {})


def test_an_aborted_record_in_sight_is_a_violation() -> None:
    ledger = Ledger()
    unit = ledger.begin("client.1")
    ledger.acknowledged(unit.add(PLACE), 0)
    ledger.aborted(unit)
    with pytest.raises(Violation, match="aborted"):
        ledger.check({PLACE: content(b"0/0")}, {})
    with pytest.raises(Violation, match="aborted"):
        ledger.saw(PLACE, 0, b"0/0")


def test_records_out_of_their_order_are_a_violation() -> None:
    ledger = Ledger()
    unit = ledger.begin("client.1")
    unit.add(PLACE)
    unit.add(PLACE)
    unit.outcome = Outcome.MAYBE
    with pytest.raises(Violation, match="follows later records"):
        ledger.check({PLACE: content(b"0/1", b"0/0")}, {})


@pytest.mark.parametrize("ends", [Ends(0, 3, 5), Ends(0, 4, 4), Ends(0, 3, 3)])
def test_an_end_that_moves_back_is_a_violation(ends: Ends) -> None:
    ledger = Ledger()
    ledger.told_ends(PLACE, Ends(0, 4, 5))
    with pytest.raises(Violation, match="went back"):
        ledger.told_ends(PLACE, ends)
    with pytest.raises(Violation, match="and now it is"):
        ledger.check({PLACE: Content(ends)}, {})


def test_a_transaction_that_hangs_is_a_violation() -> None:
    with pytest.raises(Violation, match="hangs"):
        Ledger().check_end({PLACE: content(stable=3, high=5)}, {})


def test_offsets_and_output_must_agree() -> None:
    ledger = Ledger()
    given = ledger.begin("input.1")
    ledger.acknowledged(given.add(PLACE), 0)
    given.outcome = Outcome.COMMITTED
    made = ledger.begin("stage.1")
    ledger.acknowledged(made.add(OTHER, (PLACE, 0)), 0)
    made.read_to = ("group", PLACE, 1)
    made.outcome = Outcome.MAYBE
    contents = {PLACE: content(b"0/0"), OTHER: content(b"1/0")}
    ledger.check_end(contents, {("group", PLACE): 1})
    with pytest.raises(Violation, match="is not at 1"):
        ledger.check(contents, {})
    with pytest.raises(Violation, match=r"inputs without output \[0\]"):
        ledger.check_end({PLACE: content(b"0/0"), OTHER: content()}, {("group", PLACE): 1})
