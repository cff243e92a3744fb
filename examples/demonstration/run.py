"""Exactly-once, shown: orders go through Spark while the Spark driver and the broker are killed with -9.

    script/run [--sink kafka|postgres] [--keep] [--orders N] [--seed N]

Orders are published in transactions, a fifth of which is aborted. A pipeline on Spark prices them. The driver
is killed in the middle of a batch, twice, and the broker once; each is started again. In the end every order
that was committed must have come out once, with its price, and no other. It exits with 1 if that is not so,
and if time was up before all of that had happened, or no driver was caught in the middle of a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeAlias

from caught_up import has_caught_up
from feed import Fed, feed
from outputs import Output, TableOutput, TopicOutput
from pipeline import ORDERS, PRICED
from processes import BrokerProcess, DriverProcess
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from verdict import Verdict, compare

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.testing.postgres_server import PostgresServer, find_binaries

PARTITIONS: Final = 4
DEFAULT_ORDERS: Final = 60_000
ORDERS_A_SECOND: Final = 1_000
# So that each of the faults has its moment.
MIN_ORDERS: Final = 100
LOOK_EVERY_S: Final = 0.25
# Where bars cannot move, as in a log.
LINE_EVERY_S: Final = 5.0
# An epoch may be open for a few milliseconds only.
CATCH_EVERY_S: Final = 0.01
CATCH_EPOCH_S: Final = 20.0
AMID_EPOCH: Final = "in the middle of an epoch"
# A killed driver needs a new JVM and a new session each time; a machine with other work needs longer.
CAUGHT_UP_TIMEOUT_S: Final = 300.0


class Demonstration:
    """One run: what goes in, what comes out, and what is killed when."""

    def __init__(
        self,
        orders: int,
        broker: BrokerProcess,
        cluster: Cluster,
        driver: DriverProcess,
        output: Output,
        console: Console,
    ) -> None:
        self.orders = orders
        self.broker = broker
        self.cluster = cluster
        self.driver = driver
        self.output = output
        self.fed = Fed()
        self.killed: list[str] = []
        self._is_driver_caught = False
        # Why nothing is shown, though what came out may be right.
        self.shortfall: str | None = None
        self._console = console
        self._began = self._last_line_at = time.monotonic()
        # When this share of all orders has come out, this happens.
        self.faults: list[tuple[float, Callable[[str], None]]] = [
            (0.10, self._kill_driver),
            (0.35, self._kill_broker),
            (0.55, self._kill_driver),
        ]

    async def run(self, progress: Progress, seed: int) -> Verdict:
        self.driver.start(self.broker.bootstrap)
        self._tell(f"Spark driver started, pid {self.driver.pid}")
        feeding = asyncio.create_task(
            feed(
                self.broker.bootstrap,
                ORDERS,
                self.fed,
                orders=self.orders,
                seconds=self.orders / ORDERS_A_SECOND,
                seed=seed,
            )
        )
        try:
            await self._watch(progress, feeding)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        # All of it, read when the pipeline has nothing left to do: what came late is seen, too.
        return compare(self.fed.committed, await self.output.rows())

    async def _watch(self, progress: Progress, feeding: asyncio.Task[None]) -> None:
        sent = progress.add_task("orders in", total=self.orders)
        out = progress.add_task("orders out", total=None)
        deadline = time.monotonic() + self.orders / ORDERS_A_SECOND + CAUGHT_UP_TIMEOUT_S
        while time.monotonic() < deadline:
            if feeding.done():
                feeding.result()
            # Before it is counted: at the end the bar is full.
            is_over = feeding.done() and not self.faults and await self._has_caught_up()
            count = await self.output.count()
            progress.update(sent, completed=self.fed.sent)
            progress.update(out, completed=count, total=len(self.fed.committed))
            await self._maybe_tell_count()
            if is_over:
                if not self._is_driver_caught:
                    self._fall_short("no Spark driver was killed in the middle of an epoch")
                return
            await self._maybe_kill(count)
            self._revive()
            await asyncio.sleep(LOOK_EVERY_S)
        self._fall_short(
            f"time was up with {len(self.faults)} more to kill"
            if self.faults
            else "the pipeline has not caught up in time"
        )
        self._console.print(self.driver.log_end(), markup=False)

    async def _maybe_tell_count(self) -> None:
        if self._console.is_terminal or time.monotonic() - self._last_line_at < LINE_EVERY_S:
            return
        self._last_line_at = time.monotonic()
        self._tell(f"orders in {self.fed.sent:,} of {self.orders:,}, out {await self.output.count():,}")

    def _fall_short(self, why: str) -> None:
        self.shortfall = why
        self._tell(why)

    async def _has_caught_up(self) -> bool:
        return await has_caught_up(self.cluster, ORDERS, self.driver.checkpoint)

    async def _maybe_kill(self, count: int) -> None:
        if not self.faults or count < self.faults[0][0] * self.orders:
            return
        moment = AMID_EPOCH if await self._catch_epoch() else "between two epochs"
        self.faults.pop(0)[1](moment)

    async def _catch_epoch(self) -> bool:
        """Waits for an epoch to be open; not for ever, since all orders may be out."""
        give_up = time.monotonic() + CATCH_EPOCH_S
        while time.monotonic() < give_up:
            if await self.output.is_amid_epoch():
                return True
            await self._maybe_tell_count()
            await asyncio.sleep(CATCH_EVERY_S)
        return False

    def _kill_driver(self, moment: str) -> None:
        pid = self.driver.pid
        self.driver.kill()
        self.killed.append(f"Spark driver {pid}, {moment}")
        self._is_driver_caught |= moment == AMID_EPOCH
        self._tell(f"[red]kill -9[/red] of the Spark driver, pid {pid}, {moment}")

    def _kill_broker(self, moment: str) -> None:
        pid = self.broker.pid
        self.broker.kill()
        self.killed.append(f"broker {pid}, {moment}")
        self._tell(f"[red]kill -9[/red] of the broker, pid {pid}, {moment}")
        self._tell(f"broker is back on its directory after {self.broker.start():.2f} s")

    def _revive(self) -> None:
        """A driver that was killed, or gave up on a dead broker, is started again on its checkpoint."""
        if not self.driver.is_alive:
            self.driver.start(self.broker.bootstrap)
            self._tell(f"Spark driver started again on its checkpoint, pid {self.driver.pid}")

    def _tell(self, what: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {what}", highlight=False)


@contextlib.contextmanager
def postgres(wanted: bool) -> Iterator[str | None]:
    if not wanted:
        yield None
        return
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("there is no PostgreSQL to show it with: as root, apt-get install postgresql")
    server = PostgresServer(binaries)
    try:
        server.start()
        yield server.dsn
    finally:
        server.close()


@contextlib.asynccontextmanager
async def staged(
    orders: int, directory: Path, dsn: str | None, console: Console
) -> AsyncIterator[Demonstration]:
    """A broker with its topics, a driver that is not yet started, and the output; ended in the end."""
    broker, driver = BrokerProcess(directory), DriverProcess(directory, dsn)
    try:
        seconds = broker.start()
        console.print(f"broker ready on {broker.bootstrap} after {seconds:.2f} s, pid {broker.pid}")
        async with Cluster(broker.bootstrap) as cluster:
            for topic in (ORDERS, PRICED):
                await Admin(cluster).create_topic(topic, partitions=PARTITIONS)
            output = TopicOutput(broker.bootstrap) if dsn is None else TableOutput(dsn)
            yield Demonstration(orders, broker, cluster, driver, output, console)
    finally:
        driver.kill()
        broker.kill()


# How a demonstration is made ready; tests give another, to see what a broken pipeline comes to.
Stage: TypeAlias = Callable[[int, Path, str | None, Console], AbstractAsyncContextManager[Demonstration]]


def title(demonstration: Demonstration, verdict: Verdict) -> str:
    if not verdict.is_exactly_once:
        return "NOT exactly once"
    if demonstration.shortfall is not None:
        return f"NOT shown to be exactly once: {demonstration.shortfall}"
    return "exactly once"


def report(demonstration: Demonstration, verdict: Verdict, seconds: float, console: Console) -> None:
    fed = demonstration.fed
    table = Table(title=title(demonstration, verdict))
    table.add_column("what")
    table.add_column("how many", justify="right")
    for what, number in (
        ("orders in", fed.sent),
        ("committed", len(fed.committed)),
        ("aborted", fed.aborted),
        ("out", verdict.out),
        ("lost", verdict.lost),
        ("duplicated", verdict.duplicated),
        ("out, though not committed", verdict.uncommitted),
        ("out, with a wrong price", verdict.wrong),
    ):
        table.add_row(what, f"{number:,}")
    table.add_row("killed with -9", "\n".join(demonstration.killed))
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)


async def keep(demonstration: Demonstration, console: Console) -> None:
    """Until Ctrl-C, which is how it is to end: the verdict stays."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
    bootstrap = demonstration.broker.bootstrap
    looks = [f"semel txn list -b {bootstrap}", f"semel group list -b {bootstrap}"]
    console.print("all of it is left running; have a look, and end it with Ctrl-C:", highlight=False)
    for command in [*demonstration.output.looks, *looks]:
        # As one line, to be copied.
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    await ended.wait()


async def demonstrate(sink: str, orders: int, *, keep_running: bool, seed: int, stage: Stage) -> int:
    console = Console()
    began = time.monotonic()
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="semel-demonstration-") as directory,
        postgres(sink == "postgres") as dsn,
    ):
        async with stage(orders, Path(directory), dsn, console) as demonstration:
            with Progress(*columns, console=console) as progress:
                verdict = await demonstration.run(progress, seed)
            report(demonstration, verdict, time.monotonic() - began, console)
            if keep_running:
                await keep(demonstration, console)
    return 0 if verdict.is_exactly_once and demonstration.shortfall is None else 1


def order_count(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_ORDERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {MIN_ORDERS}")
    return int(text)


def main(given: Sequence[str] | None = None, stage: Stage = staged) -> int:
    parser = argparse.ArgumentParser(
        prog="script/run",
        description="Exactly-once, shown: nothing is lost or doubled by kill -9.",
        allow_abbrev=False,
    )
    shown = "(default: %(default)s)"
    parser.add_argument(
        "--sink", choices=("kafka", "postgres"), default="kafka", help=f"where orders go to {shown}"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave it running in the end, for a look round (default: end it)"
    )
    parser.add_argument(
        "--orders",
        type=order_count,
        default=DEFAULT_ORDERS,
        metavar="N",
        help=f"how many, {ORDERS_A_SECOND:,} a second; at least {MIN_ORDERS} {shown}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        metavar="N",
        help="of what is sent and aborted (default: the time)",
    )
    arguments = parser.parse_args(given)
    try:
        return asyncio.run(
            demonstrate(
                arguments.sink,
                arguments.orders,
                keep_running=arguments.keep,
                seed=arguments.seed,
                stage=stage,
            )
        )
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
