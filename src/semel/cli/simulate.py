"""`semel simulate`: crash a simulated broker, thousands of times, and hold it to its promises."""

import json
import os
import sys
import time
from dataclasses import asdict

import click

from semel.cli.tables import output_option
from semel.server.planted import FAULTS, NO_FAULT
from semel.simulate.campaign import play_seeds
from semel.simulate.exhaustive import PAIRS, Scope, explore
from semel.simulate.run import STEPS, Failure, Tally

DEFAULT_SEEDS = 2000
SHOWN_FAILURES = 5


@click.command
@click.option("--seeds", type=click.IntRange(1), help="How many seeds. [default: 2000; 1 with --seed]")
@click.option("--seed", type=click.IntRange(0), help="The first seed, or the one to play again.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Steps of each seed.")
@click.option("--processes", type=click.IntRange(1), help="At a time. [default: one a core]")
@click.option(
    "--exhaustive", type=click.IntRange(1), metavar="DEPTH", help="Every interleaving to this depth."
)
@click.option(
    "--fault",
    type=click.Choice([NO_FAULT, *FAULTS]),
    default=NO_FAULT,
    hidden=True,
    help="A promise to break.",
)
@output_option
def command(
    seeds: int | None,
    seed: int | None,
    steps: int,
    processes: int | None,
    exhaustive: int | None,
    fault: str,
    output: str,
) -> None:
    """Run whole brokers under a simulated clock, network and disk.

    Producers, transactions, groups, timeouts, zombies, torn writes, failed fsyncs, crashes at any operation:
    a seed decides all of it, and a seed that fails can be played again. No broker is needed.
    """
    if exhaustive is not None:
        sys.exit(_explore(exhaustive, fault, output))
    count = seeds or (DEFAULT_SEEDS if seed is None else 1)
    first = seed or 0
    began_s = time.monotonic()
    total, failures = Tally(), []
    chosen = range(first, first + count)
    for tally, failed in play_seeds(
        chosen, steps=steps, fault=fault, processes=processes or os.cpu_count() or 1
    ):
        total.add(tally)
        failures += failed
    failures.sort(key=lambda failure: failure.seed)
    again = f"--steps {steps}" + ("" if fault == NO_FAULT else f" --fault {fault}")
    _report(total, failures, time.monotonic() - began_s, again, output)
    sys.exit(1 if failures else 0)


def _report(total: Tally, failures: list[Failure], elapsed_s: float, again: str, output: str) -> None:
    """`again`: the options that decide, besides the seed, what a seed does."""
    if output == "json":
        report = {**asdict(total), "elapsed_s": elapsed_s, "failures": [asdict(item) for item in failures]}
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{total.seeds} seeds held in {elapsed_s:.1f} s: {total.steps} steps, {total.committed} committed, "
        f"{total.aborted} aborted, {total.unknown} unknown to their client, {total.crashes} crashes, "
        f"{total.recoveries} recoveries in place, {total.checks} checks of everything"
    )
    for failure in failures[:SHOWN_FAILURES]:
        click.echo(
            f"seed {failure.seed} broke at step {failure.step}: {failure.text}\n"
            f"  play it again: semel simulate --seed {failure.seed} {again}"
        )
    if len(failures) > SHOWN_FAILURES:
        click.echo(f"and {len(failures) - SHOWN_FAILURES} more seeds")


def _explore(depth: int, fault: str, output: str) -> int:
    """With producers of every version; the first of them that breaks a promise is the last."""
    for clients in PAIRS:
        found = explore(Scope(depth=depth, clients=clients, fault=fault))
        if output == "json":
            click.echo(json.dumps(asdict(found)))
        else:
            click.echo(
                f"depth {found.depth}, {found.clients}: {found.states} states, "
                f"{found.transitions} transitions, {found.crashes} crashes in {found.elapsed_s:.1f} s"
            )
        if found.violation:
            if output != "json":
                click.echo(f"{found.violation}\n  by: {' ; '.join(found.path)}")
            return 1
    return 0
