"""One slot: a transactional id, its producer, and its session in the database, for one transaction at a time.

The steps of a transaction, in this order (docs/design/atomic.md has what a crash after each of them leaves):

    begin → statements and records → prepare → save → decide → complete

Up to `save`, everything is undone by `roll_back`. `decide` is the database's COMMIT: once it was sent, only
the row says what became of the transaction. `mend` reads it, ends what is open in Kafka accordingly, and
makes the slot fit for use again. A slot that is opened is mended first: that is recovery.
"""

import secrets
import time
from enum import Enum
from typing import Final

import psycopg
from psycopg import sql

from semel.client.cluster import Cluster
from semel.client.coordinator import VERSION_2
from semel.client.producer import PendingRecord, ProducerIdentity
from semel.client.shared_transaction import (
    Outcome,
    Resumed,
    TransactionOptions,
    format_prepared,
    parse_prepared,
)
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import SemelError
from semel.sinks.atomic.database import Result, Saved, SlotRow, SlotSession, one_line
from semel.sinks.atomic.settings import AtomicSettings
from semel.sinks.errors import CommitFailed, ConnectionLost, InitFailed, UnknownOutcome
from semel.wire.records import Headers

TXN_TOKEN_BYTES: Final = 8
# Classes of SQLSTATE: connection exceptions, and the server's operator ending sessions.
SESSION_ENDED: Final = ("08", "57P")


class Recovered(Enum):
    """What `mend` found open in Kafka, and did about it."""

    NOTHING = "nothing was open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Slot:
    """Not for use by several tasks at once. A step that fails leaves it fit for `mend` only."""

    def __init__(
        self, row: SlotRow, cluster: Cluster, cluster_id: str | None, dsn: str, settings: AtomicSettings
    ) -> None:
        self.row = row
        self.session = SlotSession(row, dsn, settings)
        self.saved: Saved | None = None
        self._cluster = cluster
        self._cluster_id = cluster_id
        self._options = TransactionOptions(two_phase=True, end_timeout_ms=int(settings.commit_timeout * 1000))
        self._producer: TransactionalProducer | None = None
        self._has_published = False
        self._prepared_since: float | None = None
        self.txn = ""

    @property
    def prepared_for_s(self) -> float | None:
        """For how long readers of the topics have been waiting for this slot's prepared transaction."""
        return None if self._prepared_since is None else time.monotonic() - self._prepared_since

    @property
    def producer(self) -> TransactionalProducer:
        if self._producer is None:
            raise ConnectionLost(f"slot {self.row.transactional_id!r} is being mended")
        return self._producer

    # The steps of a transaction

    async def begin(self) -> None:
        self.txn = secrets.token_hex(TXN_TOKEN_BYTES)
        self._has_published = False
        self.saved = None
        try:
            await self.session.begin()
        except psycopg.Error as error:
            raise ConnectionLost(f"no transaction could be begun: {one_line(error)}") from error

    async def execute(self, query: str | bytes | sql.Composable, params: object = None) -> Result:
        return await self.session.execute(query, params)

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> PendingRecord:
        if not self._has_published:
            await self.producer.begin()
            self._has_published = True
        return await self.producer.send(
            topic, value, key=key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
        )

    async def prepare(self) -> ProducerIdentity | None:
        """Everything that was published is acknowledged; the pair that it was written under, if any was."""
        if not self._has_published:
            return None
        pair = parse_prepared(await self.producer.prepare())
        self._prepared_since = time.monotonic()
        return pair

    async def save(self, pair: ProducerIdentity | None) -> None:
        try:
            self.session.require_transaction()
            await self.session.save(self.txn, pair)
        except psycopg.Error as error:
            raise CommitFailed(f"the transaction was not committed: {one_line(error)}") from error

    async def decide(self) -> None:
        """COMMIT. Raises CommitFailed where the server says no, UnknownOutcome where it says nothing."""
        try:
            await self.session.commit()
        except ConnectionLost as error:
            raise UnknownOutcome(str(error)) from error
        except psycopg.Error as error:
            if _is_silent(error):
                raise UnknownOutcome(
                    f"the connection was lost during the commit: {one_line(error)}"
                ) from error
            raise CommitFailed(
                f"the database refused to commit: {one_line(error)}", is_permanent=True
            ) from error

    async def complete(self) -> None:
        """Makes the records visible. It is decided: whoever does it, they will be."""
        if self._has_published:
            await self.producer.complete(Outcome.COMMIT)
        self._prepared_since = None

    async def roll_back(self) -> None:
        """Drops both halves of a transaction that was not decided."""
        await self.session.rollback()
        if not self._has_published:
            return
        if self._prepared_since is None:
            await self.producer.abort()
        else:
            await self.producer.complete(Outcome.ABORT)
        self._prepared_since = None

    # Recovery

    async def mend(self) -> Recovered:
        """Ends what is open in Kafka as the database says, and makes the slot fit for use.

        Idempotent; may be repeated after any failure but FencedOut. `saved` is what the row says of the last
        committed transaction, from the moment at which that is known.
        """
        await self.drop()
        saved = self.saved = await self.claim()
        # Asked before, so that a process that slept does not fence its successor's producer; and after,
        # because it may have slept just here, and must not decide by a row that it read before.
        await self.look()
        producer, found = await self.resume(saved.pair)
        await self.session.check_owner()
        recovered = await self.end(producer, found)
        await self.session.clear_pair()
        self._producer = producer
        self._prepared_since = None
        return recovered

    async def claim(self) -> Saved:
        return await self.session.open(self._cluster_id)

    async def look(self) -> None:
        await self.session.check_owner()

    async def resume(self, pair: ProducerIdentity | None) -> tuple[TransactionalProducer, Resumed]:
        producer = TransactionalProducer(self._cluster, self.row.transactional_id, self._options)
        found = await producer.resume(None if pair is None else format_prepared(pair))
        if producer.version < VERSION_2:
            raise InitFailed(
                "the broker speaks version 1 of transactions, in which two of them may have the same "
                "identity: raise its feature transaction.version to 2"
            )
        return producer, found

    async def end(self, producer: TransactionalProducer, found: Resumed) -> Recovered:
        if found is Resumed.NOTHING:
            return Recovered.NOTHING
        outcome = Outcome.COMMIT if found is Resumed.SAME else Outcome.ABORT
        await producer.complete(outcome)
        return Recovered.COMMITTED if outcome is Outcome.COMMIT else Recovered.ABORTED

    async def drop(self) -> None:
        """Lets go of session and producer, and sends nothing."""
        self.session.drop()
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                await producer.close()
            except SemelError:
                pass  # `mend` ends what it had open

    async def release(self) -> None:
        """Leaves nothing to recover, if it is between transactions, and lets go."""
        try:
            if self._producer is not None:
                await self.session.clear_pair()
        except (SemelError, psycopg.Error):
            pass  # the next owner finds nothing open under that pair
        await self.drop()


def _is_silent(error: psycopg.Error) -> bool:
    """Whether the server ended the session in place of an answer to COMMIT."""
    return error.sqlstate is None or error.sqlstate.startswith(SESSION_ENDED)
