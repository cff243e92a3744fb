"""A program that runs epochs into a MySQL sink, and dies or falls asleep where it is told to.

The steps, the epochs and the arguments are those of `postgres_driver`, with a URL in place of the DSN.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgres_driver import ROWS_A_TASK, STEPS, StepSession, Stopper, run_epochs

from semel.sinks.errors import FencedOut, SinkError
from semel.sinks.mysql import MySQLDialect
from semel.sinks.mysql.sink import parse_url
from semel.sinks.settings import SinkSettings
from semel.sinks.sql.dialect import SqlSession, SqlValue
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy, make_target


class MySQLStepSession(StepSession):
    async def execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        changed = await super().execute(statement, parameters)
        if statement.startswith("INSERT INTO `kept`"):
            self._stopper.reach("rows moved")
        return changed


@dataclass(slots=True, frozen=True)
class StepDialect(MySQLDialect):
    """Makes sessions that stop; in other processes, to which it is sent without its stopper, they do not."""

    stopper: Stopper | None = None

    async def connect(self, label: str) -> SqlSession:
        session = await MySQLDialect.connect(self, label)
        return session if self.stopper is None else MySQLStepSession(session, self.stopper)

    def __reduce__(self) -> tuple[Any, ...]:
        return MySQLDialect, (self.address, self.idle_timeout_s, self.local_infile, self.bulk)


def make_sink(url: str, strategy: str, stopper: Stopper | None = None) -> SqlSink:
    target = make_target(
        "kept", mode="append", keys=(), order_by=None, change_column=None, columns=None, schema=None,
        create_table=False,
    )  # fmt: skip
    # So few that rows are on the server when the program stops half way.
    settings = SinkSettings(max_buffered=ROWS_A_TASK // 2)
    sink = SqlSink(StepDialect(parse_url(url), stopper=stopper), target, Strategy(strategy), settings)
    sink.share()
    return sink


async def main(url: str, strategy: str, epochs: int, stopper: Stopper) -> int:
    stopper.is_armed = stopper.step in STEPS[:3]
    try:
        async with make_sink(url, strategy, stopper) as sink:
            await run_epochs(sink, epochs, stopper)
    except SinkError as error:
        print(type(error).__name__, error, flush=True)
        return 3 if isinstance(error, FencedOut) else 4
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    step, how = (*sys.argv[4:], "", "kill")[:2]
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Stopper(step, how))))
