"""Epochs that are held open, and what a server knows of them.

One task of the epoch waits in the user's code; what its other tasks have written is in the target, and is not
committed. Servers are asked, not the sink: whatever a test does then, it does to an open epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everyone does

from semel.client.cluster import Cluster
from semel.client.transaction_admin import TransactionAdmin
from semel.sinks.kafka.markers import transactional_id_of
from semel.sinks.sql.names import STAGE_PREFIX, WRITER_COLUMN

if TYPE_CHECKING:
    from mariadb_server import MariaDBServer
    from pyspark.sql import DataFrame

    from semel.testing.postgres_server import PostgresServer

TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05

# Whether there are rows of an epoch in the target that are not committed.
IsOpen = Callable[[], bool]


class Hold:
    """User code that waits at a row, the first time, until it is let go."""

    def __init__(self, directory: Path, value: bytes) -> None:
        self._value = value
        self._held = directory / "held"
        self._go = directory / "go"

    def rows(self, df: DataFrame) -> DataFrame:
        """The same rows; in the stage of the writers, if nothing is shuffled after it."""
        value, held, go, poll_s = self._value, self._held, self._go, POLL_S

        @F.udf(returnType="binary", useArrow=False)
        def wait(given: bytes) -> bytes:
            if given == value and not go.exists():
                held.touch()
                while not go.exists():
                    time.sleep(poll_s)
            return given

        return df.select("key", wait(F.col("value").cast("binary")).alias("value"))

    def await_open(self, is_open: IsOpen) -> None:
        """Until the row is held, and rows of other tasks are in the target."""
        await_true(self._held.exists, "no row is held")
        await_true(is_open, "no rows of the epoch are in the target")

    def let_go(self) -> None:
        self._go.touch()


def await_true(is_so: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up, f"{otherwise}, after {TIMEOUT_S:g} s"
        time.sleep(POLL_S)


def is_open_on_broker(bootstrap: str, sink_id: str, topic: str) -> bool:
    """Of Semel or of Apache Kafka: a transaction of the sink is open, with partitions of the topic in it."""
    return asyncio.run(_is_open_on_broker(bootstrap, sink_id, topic))


async def _is_open_on_broker(bootstrap: str, sink_id: str, topic: str) -> bool:
    async with Cluster(bootstrap) as cluster:
        described = await TransactionAdmin(cluster).describe(transactional_id_of(sink_id))
    return described.is_open and any(where.topic == topic for where in described.partitions)


def is_open_in_postgres(server: PostgresServer, table: str) -> bool:
    """Somebody else has written to the table, and has not committed: nothing else locks it like this."""
    return _count(
        server.query(
            "SELECT count(*) FROM pg_locks JOIN pg_class ON relation = pg_class.oid "
            f"WHERE relname = '{table}' AND mode = 'RowExclusiveLock' AND granted"
        )
    )


def is_staged_in_postgres(server: PostgresServer, writers: int) -> bool:
    """So many writers have staged all their rows, and are gone."""
    stages = server.query(
        f"SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, '{STAGE_PREFIX}')"
    )
    staged = [server.query(f'SELECT count(DISTINCT {WRITER_COLUMN}) FROM "{stage}"') for (stage,) in stages]
    is_written = sum(rows[0][0] for rows in staged) == writers
    writing = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'semel-writer:')"
    return is_written and not _count(server.query(writing))


def is_staged_in_mariadb(server: MariaDBServer, writers: int) -> bool:
    """So many writers have staged rows, each of them in a transaction that is committed."""
    stages = server.query(
        "SELECT table_name FROM information_schema.tables "
        f"WHERE table_schema = DATABASE() AND table_name LIKE '{STAGE_PREFIX}%'"
    )
    staged = [server.query(f"SELECT count(DISTINCT {WRITER_COLUMN}) FROM `{stage}`") for (stage,) in stages]
    return sum(rows[0][0] for rows in staged) == writers


def is_open_in_mariadb(server: MariaDBServer) -> bool:
    return _count(
        server.query("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_rows_modified > 0")
    )


def _count(rows: list[tuple[Any, ...]]) -> bool:
    return bool(rows[0][0])
