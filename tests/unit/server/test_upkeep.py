"""Upkeep leaves the event loop to others in between, however much there is to look at."""

from __future__ import annotations

import asyncio

from semel.broker.decision import Decision
from semel.broker.entries import Entry
from semel.broker.transaction_messages import TransactionIdentified
from semel.server.clock import SystemClock
from semel.server.node import Node
from semel.server.settings import Settings
from semel.server.upkeep import IDS_PER_TURN, Upkeep

TURNS = 4


def identified(number: int, updated_ms: int) -> TransactionIdentified:
    return TransactionIdentified(
        transactional_id=f"app-{number}", producer_id=number, producer_epoch=0, updated_ms=updated_ms
    )


async def test_idle_transactional_ids_are_forgotten_some_at_a_turn() -> None:
    node = Node(Settings.load(), SystemClock(), None, lambda: None)
    await node.start()
    count = TURNS * IDS_PER_TURN
    entries: list[Entry] = [identified(number, updated_ms=0) for number in range(count)]
    entries.append(identified(count, updated_ms=node.clock.wall_ms()))
    node.life.submit(None, Decision(None, entries))
    known = node.life.broker.transactions.by_id
    seen = []
    upkeep = asyncio.create_task(Upkeep(node).retain())
    while not upkeep.done():
        seen.append(len(known))
        await asyncio.sleep(0)
    await upkeep
    assert set(known) == {f"app-{count}"}
    assert set(seen) >= {count + 1 - turn * IDS_PER_TURN for turn in range(TURNS)}
    await node.stop()
