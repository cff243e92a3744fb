"""Many seeds, on all cores."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Final

from semel.server.planted import NO_FAULT
from semel.simulate.machine import silenced
from semel.simulate.run import STEPS, Failure, Tally, play

SEEDS_PER_TASK: Final = 20


def play_seeds(
    seeds: range, *, steps: int = STEPS, fault: str = NO_FAULT, processes: int = 1
) -> Iterator[tuple[Tally, list[Failure]]]:
    """Play all seeds, some at a time; the results come in any order."""
    tasks = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    work = partial(_play_some, steps, fault)
    if processes <= 1 or len(tasks) <= 1:
        yield from map(work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(work, tasks)


def _play_some(steps: int, fault: str, seeds: range) -> tuple[Tally, list[Failure]]:
    with silenced():
        return asyncio.run(_play(steps, fault, seeds))


async def _play(steps: int, fault: str, seeds: range) -> tuple[Tally, list[Failure]]:
    tally = Tally()
    failures: list[Failure] = []
    for seed in seeds:
        played = await play(seed, steps=steps, fault=fault)
        if isinstance(played, Failure):
            failures.append(played)
        else:
            tally.add(played)
    return tally, failures
