"""What the tests of transactions over a topic and a database share: a table and a topic of a test's own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import psycopg

from row_checks import check_rows
from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.client.metadata import TopicPartition
from semel.sinks.atomic import Atomic, AtomicSettings

SETTLE_TIMEOUT_S: Final = 30
PAUSE_S: Final = 0.02
POOL: Final = 2
QUICK: Final = AtomicSettings(fence_timeout=0.3, commit_timeout=10, begin_timeout=20)


@dataclass(frozen=True)
class Target:
    """Where both halves of a transaction go. `label` names the topic, the database and the application."""

    bootstrap: str
    dsn: str
    label: str

    async def make(self) -> None:
        async with Cluster(self.bootstrap) as cluster:
            await Admin(cluster).create_topic(self.label, partitions=2)
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            await connection.execute(
                "CREATE TABLE payments (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)"
            )

    def open(self, pool: int = POOL, settings: AtomicSettings = QUICK) -> Atomic:
        return Atomic(self.bootstrap, self.dsn, self.label, pool, settings)

    async def both(self) -> list[int]:
        """The ids in the table, after making sure that the topic has the same ones, each once."""
        in_topic, in_table = await self.topic_ids(), await self.table_ids()
        check_rows(in_topic, in_table, "the topic, by the table")
        return in_table

    async def table_ids(self) -> list[int]:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            cursor = await connection.execute("SELECT id FROM payments ORDER BY id")
            return [row[0] for row in await cursor.fetchall()]

    async def topic_ids(self) -> list[int]:
        """The ids of committed records, once nothing is open any more."""
        async with Cluster(self.bootstrap) as cluster:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while not await self._is_settled(cluster):  # noqa: ASYNC110
                    await asyncio.sleep(PAUSE_S)
            return sorted(await self._read(cluster))

    async def _is_settled(self, cluster: Cluster) -> bool:
        admin = Admin(cluster)
        found = await admin.describe_topic(self.label)
        wanted = {TopicPartition(self.label, each.partition): LATEST for each in found.partitions}
        stable = await admin.list_offsets(wanted, isolation_level=READ_COMMITTED)
        ends = await admin.list_offsets(wanted)
        return all(stable[where].offset == ends[where].offset for where in wanted)

    async def _read(self, cluster: Cluster) -> list[int]:
        ids: list[int] = []
        options = ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=50)
        async with Consumer(cluster, options) as consumer:
            await consumer.assign(await consumer.partitions_of(self.label))
            ends = await consumer.end_offsets()
            while any(consumer.position(where) < end for where, end in ends.items()):
                for batch in await consumer.poll(1_000):
                    ids += [int(record.value or b"") for record in batch.records()]
        return ids


async def pay(atomic: Atomic, number: int) -> None:
    """One transaction: a row and a record. The row comes first, or the record does, to try both."""
    async with atomic.begin() as tx:
        if number % 2:
            await tx.publish(atomic.name, str(number).encode(), key=str(number).encode())
            await tx.execute("INSERT INTO payments VALUES (%s)", (number,))
        else:
            await tx.execute("INSERT INTO payments VALUES (%s)", (number,))
            await tx.publish(atomic.name, str(number).encode(), key=str(number).encode())
