"""One client process of a verification: transaction after transaction until it is told to stop, or killed.

A *producer* writes to random partitions and aborts some of its transactions. A *stage* reads committed
records, writes one for each, and commits how far it has read in the same transaction. Both write down what
they do before they do it. Whatever fails before a commit is sent ends the session; the next one takes the
transactional id anew.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from semel.client.admin import READ_COMMITTED
from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.consumer import Consumer, ConsumerOptions, Start
from semel.client.errors import UnknownOutcomeError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.producer import ProducerOptions
from semel.client.shared_transaction import TransactionOptions
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import AbortableError, SemelError
from semel.verify.history import HistoryWriter
from semel.verify.ledger import Place
from semel.verify.plan import TRANSACTION_TIMEOUT_MS, Part

MAX_RECORDS: Final = 8
MAX_INPUTS: Final = 20
ABORT_SHARE: Final = 0.25
PAUSE_S: Final = 0.01
POLL_MS: Final = 200
END_TIMEOUT_MS: Final = 5_000
COMMIT_ATTEMPTS: Final = 12
SESSION_PAUSE_S: Final = 0.2
REQUEST_TIMEOUT_MS: Final = 5_000

Outgoing = list[tuple[Place, tuple[Place, int] | None]]
"""Records to send: where to, and the input record that each was made from."""


class Worker:
    """One process."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.stopping = asyncio.Event()
        self._dice = random.Random(f"{part.seed}/{part.client}")
        self._history = HistoryWriter(Path(part.history))
        self._number = part.first_unit
        self._options = TransactionOptions(
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            end_timeout_ms=END_TIMEOUT_MS,
            max_version=part.transaction_version,
        )

    async def run(self) -> None:
        while not self.stopping.is_set():
            try:
                options = ConnectionOptions(request_timeout_ms=REQUEST_TIMEOUT_MS)
                async with Cluster(self.part.bootstrap, options) as cluster:
                    await self._session(cluster)
            except SemelError:
                await self._rest(SESSION_PAUSE_S)

    async def _session(self, cluster: Cluster) -> None:
        """As long as one identity is good for."""
        cutting = asyncio.create_task(self._cut_connections(cluster))
        producer = TransactionalProducer(
            cluster, self.part.transactional_id, self._options, ProducerOptions(linger_ms=0)
        )
        try:
            await producer.open()
            if self.part.kind == "stage":
                await self._transform(cluster, producer)
            else:
                await self._produce(producer)
        finally:
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)
            with suppress(SemelError):
                await producer.close()

    async def _cut_connections(self, cluster: Cluster) -> None:
        """Lose the connection under requests: their answers never come, and they are sent again."""
        every_s = self.part.cut_connections_every_s
        while every_s > 0:
            await asyncio.sleep(self._dice.expovariate(1 / every_s))
            with suppress(SemelError):
                where = TopicPartition(self.part.target_topic, self._dice.choice(self.part.partitions))
                connection = await cluster.connection(await cluster.leader_id(where))
                connection.close()

    # Producers.

    async def _produce(self, producer: TransactionalProducer) -> None:
        while not self.stopping.is_set():
            count = self._dice.randint(1, MAX_RECORDS)
            records: Outgoing = [
                ((self.part.target_topic, self._dice.choice(self.part.partitions)), None)
                for _ in range(count)
            ]
            await self._transaction(producer, records, commit=self._dice.random() >= ABORT_SHARE)
            await self._rest(self._dice.uniform(0, PAUSE_S))

    # Stages.

    async def _transform(self, cluster: Cluster, producer: TransactionalProducer) -> None:
        partitions = [TopicPartition(self.part.source_topic, index) for index in self.part.partitions]
        committed = await fetch_offsets(cluster, self.part.group, partitions)
        options = ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=POLL_MS)
        async with Consumer(cluster, options) as consumer:
            for where in partitions:
                known = committed.get(where)
                await consumer.assign([where], Start(0 if known is None else known.offset))
            while not self.stopping.is_set():
                for batch in await consumer.poll(POLL_MS):
                    offsets = [record.offset for record in batch.records()]
                    for i in range(0, len(offsets), MAX_INPUTS):
                        await self._turn(producer, batch.where, offsets[i : i + MAX_INPUTS])

    async def _turn(
        self, producer: TransactionalProducer, source: TopicPartition, offsets: list[int]
    ) -> None:
        """Some input records of one partition become output, until their transaction commits."""
        place: Place = (source.topic, source.partition)
        targets = self.part.partitions
        records: Outgoing = [
            ((self.part.target_topic, targets[offset % len(targets)]), (place, offset)) for offset in offsets
        ]
        while self._dice.random() < ABORT_SHARE:
            await self._transaction(producer, records, commit=False, read_to=(source, offsets[-1] + 1))
        await self._transaction(producer, records, commit=True, read_to=(source, offsets[-1] + 1))

    # Transactions.

    async def _transaction(
        self,
        producer: TransactionalProducer,
        records: Outgoing,
        *,
        commit: bool,
        read_to: tuple[TopicPartition, int] | None = None,
    ) -> None:
        number = self._number
        self._number += 1
        self._history.begins(number, self.part.client)
        try:
            await producer.begin()
            self._history.sends(number, records)
            for index, (place, _) in enumerate(records):
                await producer.send(place[0], b"%d/%d" % (number, index), partition=place[1])
                if self._dice.random() < 0.1:
                    await producer.flush()
            if read_to is not None:
                where, offset = read_to
                self._history.moves_group(number, self.part.group, (where.topic, where.partition), offset)
                await producer.send_offsets(GroupMetadata(self.part.group), {where: CommittedOffset(offset)})
            await producer.flush()
        except SemelError:
            self._history.aborted(number)
            raise
        if commit:
            await self._commit(producer, number)
        else:
            self._history.aborted(number)
            await producer.abort()

    async def _commit(self, producer: TransactionalProducer, number: int) -> None:
        self._history.commits(number)
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            try:
                await producer.commit()
                self._history.committed(number)
                return
            except UnknownOutcomeError:
                if attempt == COMMIT_ATTEMPTS:
                    raise
            except AbortableError:
                # The client's word: it is not committed, and never will be.
                self._history.aborted(number)
                await producer.abort()
                return

    async def _rest(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), pause_s)


async def _main(part: Part) -> None:
    worker = Worker(part)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stopping.set)
    await worker.run()


if __name__ == "__main__":
    asyncio.run(_main(Part.loads(sys.argv[1])))
