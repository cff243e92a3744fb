"""`semel verify`: does a broker keep its promises? Any broker that speaks the Kafka protocol can be asked."""

import asyncio
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from semel.cli.options import bootstrap_option
from semel.cli.tables import output_option
from semel.verify.plan import Plan
from semel.verify.rounds import CounterExample, Tally, verify

_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
LONGEST_ROUND_S: Final = 60.0
SHOWN_LINES: Final = 20


class Duration(click.ParamType[float]):
    """`90`, `90s`, `5m`, `8h`, `1d`, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; write 90s, 5m or 8h", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


DURATION: Final = Duration()


@click.command
@bootstrap_option
@click.option("--for", "duration_s", type=DURATION, default="30s", show_default=True, help="How long.")
@click.option("--producers", type=click.IntRange(1, 500), default=4, show_default=True, help="Transactional.")
@click.option(
    "--stages", type=click.IntRange(1, 100), default=2, show_default=True, help="That read, then write."
)
@click.option(
    "--partitions", type=click.IntRange(1, 1000), default=6, show_default=True, help="Of each topic."
)
@click.option(
    "--kill-clients-every", type=DURATION, default="1.5s", show_default=True, help="With -9; 0: never."
)
@click.option("--cut-connections-every", type=DURATION, default="0.5s", show_default=True, help="0: never.")
@click.option("--kill", "kill_command", metavar="CMD", help="Kills the broker; run by the shell.")
@click.option("--restart", "restart_command", metavar="CMD", help="Starts it again, and returns.")
@click.option("--kill-every", type=DURATION, default="5s", show_default=True, help="How often --kill is run.")
@click.option("--kills", type=click.IntRange(1), help="End when the broker was killed so many times.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the choices of clients and faults.")
@click.option("--keep", type=click.Path(path_type=Path), help="Where the clients' histories go, and stay.")
@output_option
def command(
    bootstrap: str,
    duration_s: float,
    producers: int,
    stages: int,
    partitions: int,
    kill_clients_every: float,
    cut_connections_every: float,
    kill_command: str | None,
    restart_command: str | None,
    kill_every: float,
    kills: int | None,
    seed: int,
    keep: Path | None,
    output: str,
) -> None:
    """Check that a broker is exactly-once, from what its clients did and what its readers saw.

    Concurrent transactional producers with random aborts, consume-transform-produce stages and a
    read_committed reader run while clients are killed with -9, connections are cut and, with --kill and
    --restart, the broker is killed. The proof is by content: no aborted read, no lost committed write, no
    duplicate, no torn transaction, order kept, no end that moves back, offsets and output that agree. Exit
    code 1 and the first counter-example if a promise was broken.

    It makes topics named semel-verify-* and deletes them again.
    """
    if (kill_command is None) != (restart_command is None):
        raise click.UsageError("--kill and --restart belong together")
    if stages > partitions:
        raise click.UsageError("each stage needs a partition: at most as many --stages as --partitions")
    plan = Plan(
        bootstrap=bootstrap,
        producers=producers,
        stages=stages,
        partitions=partitions,
        round_s=min(duration_s, LONGEST_ROUND_S),
        kill_clients_every_s=kill_clients_every,
        cut_connections_every_s=cut_connections_every,
        kill_command=kill_command,
        restart_command=restart_command,
        kill_broker_every_s=kill_every,
        broker_kills=kills,
        seed=seed,
    )
    directory = keep or Path(tempfile.mkdtemp(prefix="semel-verify-"))
    tally = Tally()
    began_s = time.monotonic()
    broken = asyncio.run(verify(plan, duration_s, directory, tally))
    _report(tally, broken, directory, time.monotonic() - began_s, output)
    sys.exit(0 if broken is None else 1)


def _report(
    tally: Tally, broken: CounterExample | None, directory: Path, elapsed_s: float, output: str
) -> None:
    if output == "json":
        report = {**asdict(tally), "elapsed_s": round(elapsed_s, 1)}
        report["counter_example"] = None if broken is None else asdict(broken)
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{elapsed_s:.0f} s, {tally.rounds} rounds: {tally.committed} transactions committed, "
        f"{tally.aborted} aborted, {tally.unknown} unknown to their client, {tally.records} records read; "
        f"{tally.client_kills} clients and {tally.broker_kills} brokers killed"
    )
    if broken is None:
        click.echo("every promise was kept")
        return
    click.echo(f"BROKEN: {broken.text}")
    for line in broken.history[:SHOWN_LINES]:
        click.echo(f"  {line}")
    click.echo(f"what the clients did is in {directory}")
