"""What has come out, as any reader sees it: committed records of a topic, or rows of a table."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from shlex import quote
from typing import Final

import psycopg
from pipeline import NAME, PRICED
from verdict import Row

from semel.client.admin import READ_COMMITTED
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.transaction_admin import TransactionAdmin
from semel.errors import BrokerError
from semel.sinks.kafka.markers import transactional_id_of

# To read what is there to its end; a broker that is killed meanwhile is back long before.
READ_TIMEOUT_S: Final = 120.0


class Output(ABC):
    """The target of the pipeline; `looks` are commands that show what is in it."""

    looks: Sequence[str]

    @abstractmethod
    async def count(self) -> int:
        """How many rows can be seen by now."""

    @abstractmethod
    async def rows(self) -> list[Row]:
        """All that can be seen: id and price."""

    @abstractmethod
    async def is_amid_epoch(self) -> bool:
        """Whether the pipeline is just now in the middle of writing."""


class TopicOutput(Output):
    """The topic, read with read_committed."""

    def __init__(self, bootstrap: str) -> None:
        self.looks = (
            f"semel consume {PRICED} -b {bootstrap} --isolation read_committed | head",
            f"semel sink list -b {bootstrap}",
        )
        self._cluster = Cluster(bootstrap)
        self._consumer = Consumer(
            self._cluster, ConsumerOptions(isolation_level=READ_COMMITTED, retry_timeout_ms=120_000)
        )
        self._rows: list[Row] = []
        self._is_assigned = False

    async def count(self) -> int:
        if not self._is_assigned:
            await self._consumer.assign(await self._consumer.partitions_of(PRICED))
            self._is_assigned = True
        while await self._take():
            pass
        return len(self._rows)

    async def rows(self) -> list[Row]:
        """To the end of the topic: that nothing came in for a moment does not say that nothing is there."""
        await self.count()
        async with asyncio.timeout(READ_TIMEOUT_S):
            ends = await self._consumer.end_offsets()
            while any(self._consumer.position(where) < end for where, end in ends.items()):
                await self._take()
        return self._rows

    async def _take(self) -> bool:
        """Whether something came in."""
        fetched = await self._consumer.poll(timeout_ms=100)
        for batch in fetched:
            for record in batch.records():
                order_id, _, cents = (record.value or b"").decode().partition(" ")
                self._rows.append((order_id, int(cents)))
        return bool(fetched)

    async def is_amid_epoch(self) -> bool:
        try:
            described = await TransactionAdmin(self._cluster).describe(transactional_id_of(NAME))
        except BrokerError:
            return False
        return described.is_open


class TableOutput(Output):
    """The table in PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self.looks = (
            f"psql {quote(dsn)} -c 'SELECT * FROM {PRICED} LIMIT 10'",
            f"semel sink list --postgres {quote(dsn)}",
        )
        self._dsn = dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {PRICED} (id text, cents bigint)")

    async def count(self) -> int:
        with psycopg.connect(self._dsn) as connection:
            found = connection.execute(f"SELECT count(*) FROM {PRICED}").fetchone()
        return 0 if found is None else int(found[0])

    async def rows(self) -> list[Row]:
        with psycopg.connect(self._dsn) as connection:
            return [
                (str(row[0]), int(row[1])) for row in connection.execute(f"SELECT id, cents FROM {PRICED}")
            ]

    async def is_amid_epoch(self) -> bool:
        """Whether the sink's own connection is in a transaction: an epoch is one, from its begin on."""
        with psycopg.connect(self._dsn) as connection:
            found = connection.execute(
                "SELECT count(*) > 0 FROM pg_stat_activity "
                "WHERE application_name LIKE 'semel:%' AND state <> 'idle'"
            ).fetchone()
        return found is not None and bool(found[0])
