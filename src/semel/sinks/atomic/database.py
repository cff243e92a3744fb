"""What stands in the database: a row for each transactional id, and the sessions that work on it.

Statements that change a row's owner travel in one message to the server, with BEGIN and COMMIT in it: a
client that is stopped half way holds no lock. The only lock that a sleeping client can hold is that of a row
that it has saved and not committed; its backend stands in the row, so that the next owner can end it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple, TypeVar, cast

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from semel.client.producer import ProducerIdentity
from semel.errors import ConfigError
from semel.sinks import keepalive
from semel.sinks.atomic.settings import AtomicSettings
from semel.sinks.errors import ConnectionLost, FencedOut, InitFailed
from semel.sinks.postgres.session import COMMIT_DURABLY, hang_up, open_connection
from semel.sinks.sql.failures import SqlFailure

T = TypeVar("T")

# How often the owner of a row whose lock is held has its holder ended, before it gives up.
MAX_FENCE_ATTEMPTS: Final = 5
TOKEN_BYTES: Final = 4

COLUMNS: Final = """
    transactional_id text PRIMARY KEY,
    name text NOT NULL,
    slot int NOT NULL,
    owner bigint NOT NULL DEFAULT 0,
    owner_text text NOT NULL DEFAULT '',
    owned_since timestamptz,
    backend_pid int,
    backend_start timestamptz,
    cluster_id text,
    txn text,
    producer_id bigint,
    producer_epoch int,
    prepared_at timestamptz,
    UNIQUE (name, slot)
"""


class Backend(NamedTuple):
    """A session of the server; pids are used again, so when it began belongs to it."""

    pid: int
    start: str


@dataclass(slots=True, frozen=True)
class SlotRow:
    """A row whose owner was raised: what it takes to work on it, and to decide what was left open."""

    transactional_id: str
    name: str
    slot: int
    owner: int
    cluster_id: str | None
    pair: ProducerIdentity | None


class Saved(NamedTuple):
    """What a slot's row says of its last committed transaction."""

    txn: str | None
    pair: ProducerIdentity | None


class Result(NamedTuple):
    """What a statement gave: its rows, if it is one that returns any, and how many it touched."""

    rows: list[TupleRow]
    row_count: int


async def connect(dsn: str, settings: AtomicSettings, purpose: str) -> AsyncConnection[TupleRow]:
    """A session with its timeouts set. Transactions are begun by hand."""
    defaults = {
        "tcp_user_timeout": str(int(settings.commit_timeout * 1000)),
        "fallback_application_name": purpose,
    }
    try:
        connection = await open_connection(dsn, defaults, {})
    except SqlFailure as failure:
        if failure.is_permanent:
            raise InitFailed(
                f"the database does not let {purpose!r} in: {failure.reason}. Mend the connection string, or "
                f"the rights of its role"
            ) from failure
        raise ConnectionLost(f"the database cannot be reached: {failure.reason}") from failure
    try:
        await connection.execute(
            "SELECT set_config('idle_in_transaction_session_timeout', %s, false), "
            "set_config('tcp_keepalives_idle', %s, false), set_config('tcp_keepalives_interval', %s, false), "
            "set_config('tcp_keepalives_count', %s, false)",
            (
                str(int(settings.idle_timeout * 1000)),
                str(keepalive.IDLE_S),
                str(keepalive.INTERVAL_S),
                str(keepalive.COUNT),
            ),
        )
        await connection.execute(COMMIT_DURABLY)
    except psycopg.Error as error:
        await connection.close()
        raise ConnectionLost(f"the database session could not be set up: {one_line(error)}") from error
    return connection


class TransactionTable:
    """The rows of all names, through one session: for opening, recovering and looking."""

    def __init__(self, connection: AsyncConnection[TupleRow], settings: AtomicSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._table = table_identifier(settings.table)

    async def create(self) -> None:
        """Makes the table if there is none. A role that may not create it needs it made beforehand."""
        if await self.exists():
            return
        statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} (" + COLUMNS + ")")
        try:
            await self._connection.execute(statement.format(self._table))
        except psycopg.errors.UniqueViolation:
            pass  # another process made it in the same moment
        except psycopg.Error as error:
            raise InitFailed(
                f"table {self._settings.table} could not be created: {one_line(error)}. Give the role that "
                f"right, or create it as docs/atomic.md says"
            ) from error

    async def exists(self) -> bool:
        found = await self._connection.execute("SELECT to_regclass(%s)", (self._settings.table,))
        row = await found.fetchone()
        return row is not None and row[0] is not None

    async def names(self) -> list[str]:
        query = sql.SQL("SELECT DISTINCT name FROM {} ORDER BY name").format(self._table)
        return [row[0] for row in await (await self._connection.execute(query)).fetchall()]

    async def add_slots(self, name: str, pool: int) -> None:
        """Rows for slots 0 to `pool` - 1, where they are not there yet."""
        query = sql.SQL(
            "INSERT INTO {} (transactional_id, name, slot) SELECT %s || slot, %s, slot "
            "FROM generate_series(0, %s::int - 1) AS slot ON CONFLICT DO NOTHING"
        ).format(self._table)
        prefix = f"{name}.{secrets.token_hex(TOKEN_BYTES)}."
        await self._connection.execute(query, (prefix, name, pool))

    async def backends(self, name: str) -> list[Backend]:
        """The sessions of the present owner that the server still has."""
        query = sql.SQL(
            "SELECT DISTINCT backend_pid, backend_start::text FROM {} AS t WHERE name = %s AND EXISTS "
            "(SELECT FROM pg_stat_activity AS a WHERE a.pid = t.backend_pid "
            "AND a.backend_start = t.backend_start)"
        ).format(self._table)
        rows = await (await self._connection.execute(query, (name,))).fetchall()
        return [Backend(*row) for row in rows]

    async def owner_text(self, name: str) -> str:
        query = sql.SQL("SELECT owner_text FROM {} WHERE name = %s ORDER BY owner DESC LIMIT 1")
        row = await (await self._connection.execute(query.format(self._table), (name,))).fetchone()
        return "" if row is None else str(row[0])

    async def raise_owner(self, name: str, owner_text: str) -> list[SlotRow]:
        """Takes all rows of a name, and ends the sessions of whoever had them.

        A predecessor that has saved and not committed is waited for, up to `fence_timeout`, and then
        its session is ended: its transaction is rolled back.
        """
        predecessors = await self.backends(name)
        for _ in range(MAX_FENCE_ATTEMPTS):
            try:
                rows = await self._raise_owner(name, owner_text)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                await self._connection.rollback()
                await end_backends(self._connection, predecessors)
                predecessors = await self.backends(name)
                continue
            # What they still have open can commit nothing, and may hold locks.
            await end_backends(self._connection, predecessors)
            return rows
        raise InitFailed(
            f"the rows of {name!r} in {self._settings.table} stay locked by another session: see pg_locks"
        )

    async def _raise_owner(self, name: str, owner_text: str) -> list[SlotRow]:
        # The number is a time, so that not even deleted rows bring back one that a sleeper may still have.
        statements = sql.SQL(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
            "SET LOCAL lock_timeout = {lock_timeout}; "
            "SELECT pg_advisory_xact_lock(hashtext({table_name}), hashtext({name})); "
            "UPDATE {table} SET owner = greatest(owner + 1, "
            "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint), owner_text = {owner_text}, "
            "owned_since = now(), backend_pid = NULL, backend_start = NULL WHERE name = {name} "
            "RETURNING transactional_id, name, slot, owner, cluster_id, producer_id, "
            "producer_epoch; COMMIT"
        ).format(
            lock_timeout=sql.Literal(f"{int(self._settings.fence_timeout * 1000)}ms"),
            table_name=sql.Literal(self._settings.table),
            name=sql.Literal(name),
            owner_text=sql.Literal(owner_text),
            table=self._table,
        )
        cursor = await self._connection.execute(statements, prepare=False)
        for _ in range(3):
            cursor.nextset()
        return sorted([_slot_row(*row) for row in await cursor.fetchall()], key=_slot)


class SlotSession:
    """One slot's session: the database's half of its transactions. Every call may lose the connection."""

    def __init__(self, row: SlotRow, dsn: str, settings: AtomicSettings) -> None:
        self._row = row
        self._dsn = dsn
        self._settings = settings
        self._table = table_identifier(settings.table)
        self._connection: AsyncConnection[TupleRow] | None = None
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def connection(self) -> AsyncConnection[TupleRow]:
        if self._connection is None:
            raise ConnectionLost(f"slot {self._row.transactional_id!r} has no database session")
        return self._connection

    @property
    def is_lost(self) -> bool:
        """Whether the session has ended without being asked to."""
        return self._connection is None or self._connection.closed

    async def open(self, cluster_id: str | None) -> Saved:
        """A new session that claims the slot's row. It waits for the end of the session before it."""
        self.drop()
        self._connection = await connect(self._dsn, self._settings, f"semel {self._row.name}"[:63])
        for _ in range(MAX_FENCE_ATTEMPTS):
            try:
                return await self._claim(cluster_id)
            except psycopg.errors.LockNotAvailable:
                await self._connection.rollback()
                await end_backends(self._connection, await self._recorded_backend())
            except psycopg.Error as error:
                raise ConnectionLost(f"{self._name} could not be claimed: {one_line(error)}") from error
        raise ConnectionLost(f"{self._name} stays locked by another session: see pg_locks")

    async def _claim(self, cluster_id: str | None) -> Saved:
        statements = sql.SQL(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_timeout}; "
            "UPDATE {table} SET backend_pid = pg_backend_pid(), backend_start = (SELECT backend_start "
            "FROM pg_stat_activity WHERE pid = pg_backend_pid()), cluster_id = {cluster_id} "
            "WHERE transactional_id = {transactional_id} AND owner = {owner} "
            "RETURNING txn, producer_id, producer_epoch; COMMIT"
        ).format(
            lock_timeout=sql.Literal(f"{int(self._settings.fence_timeout * 1000)}ms"),
            table=self._table,
            cluster_id=sql.Literal(cluster_id),
            transactional_id=sql.Literal(self._row.transactional_id),
            owner=sql.Literal(self._row.owner),
        )
        cursor = await self.connection.execute(statements, prepare=False)
        cursor.nextset()
        cursor.nextset()
        row = await cursor.fetchone()
        if row is None:
            raise await self._fenced()
        return Saved(row[0], _pair(row[1], row[2]))

    async def _recorded_backend(self) -> list[Backend]:
        query = sql.SQL(
            "SELECT backend_pid, backend_start::text FROM {} WHERE transactional_id = %s AND owner = %s "
            "AND backend_pid IS NOT NULL"
        ).format(self._table)
        cursor = await self.connection.execute(query, (self._row.transactional_id, self._row.owner))
        return [Backend(*row) for row in await cursor.fetchall()]

    async def check_owner(self) -> None:
        """Raises FencedOut unless the row is still this owner's."""
        query = sql.SQL("SELECT 1 FROM {} WHERE transactional_id = %s AND owner = %s").format(self._table)
        found = await self._run(self.connection.execute(query, (self._row.transactional_id, self._row.owner)))
        if await found.fetchone() is None:
            raise await self._fenced()

    async def clear_pair(self) -> None:
        """What the pair named has been completed: it means nothing any more."""
        query = sql.SQL(
            "UPDATE {} SET producer_id = NULL, producer_epoch = NULL, prepared_at = NULL "
            "WHERE transactional_id = %s AND owner = %s"
        ).format(self._table)
        await self._update(query, (self._row.transactional_id, self._row.owner))

    # The transaction

    async def begin(self) -> None:
        await self._run(self.connection.execute("BEGIN"))

    async def execute(self, query: str | bytes | sql.Composable, params: object = None) -> Result:
        cursor = await self.connection.execute(cast("LiteralString", query), cast("Sequence[Any]", params))
        rows = await cursor.fetchall() if cursor.description is not None else []
        self.require_transaction(cursor.statusmessage or "")
        return Result(rows, cursor.rowcount)

    def require_transaction(self, status: str = "") -> None:
        """Notices a transaction that was ended by hand."""
        state = self.connection.info.transaction_status
        if state is TransactionStatus.IDLE or status in ("COMMIT", "PREPARE TRANSACTION"):
            raise ConfigError(
                "the database transaction was ended inside its block: leave COMMIT and ROLLBACK to the block"
            )

    async def save(self, txn: str, pair: ProducerIdentity | None) -> None:
        """Writes into the transaction what it is called in Kafka. FencedOut if the row is not ours."""
        query = sql.SQL(
            "UPDATE {} SET txn = %s, producer_id = %s, producer_epoch = %s, prepared_at = clock_timestamp() "
            "WHERE transactional_id = %s AND owner = %s"
        ).format(self._table)
        producer_id, epoch = (None, None) if pair is None else (pair.producer_id, pair.producer_epoch)
        await self._update(query, (txn, producer_id, epoch, self._row.transactional_id, self._row.owner))

    async def commit(self) -> None:
        await self._run(self.connection.execute("COMMIT"))

    async def rollback(self) -> None:
        await self._run(self.connection.execute("ROLLBACK"))

    async def _update(self, query: sql.Composed, params: Sequence[object]) -> None:
        cursor = await self._run(self.connection.execute(query, params))
        if cursor.rowcount != 1:
            raise await self._fenced()

    async def _run(self, work: Awaitable[T]) -> T:
        """Waits for a statement at most `commit_timeout`; a session that does not answer is given up.

        The driver would wait for the server even when it is cancelled, so it is left alone.
        """
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ran)
        done, _ = await asyncio.wait({task}, timeout=self._settings.commit_timeout)
        if done:
            return task.result()
        self.drop()
        raise ConnectionLost(
            f"the database has not answered {self._name} for {self._settings.commit_timeout:g} s"
        )

    def _ran(self, task: "asyncio.Future[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # where it was given up, what became of it is asked for by other means

    async def _fenced(self) -> FencedOut:
        query = sql.SQL("SELECT owner_text FROM {} WHERE transactional_id = %s").format(self._table)
        taker = "someone who deleted its row"
        try:
            if self.connection.info.transaction_status is not TransactionStatus.IDLE:
                await self._run(self.connection.execute("ROLLBACK"))
            cursor = await self._run(self.connection.execute(query, (self._row.transactional_id,)))
            row = await cursor.fetchone()
            taker = taker if row is None else str(row[0])
        except (psycopg.Error, ConnectionLost):
            taker = "another owner"
        return FencedOut(f"{self._row.name!r} was taken over by {taker}: stop this process")

    @property
    def _name(self) -> str:
        return f"transactional id {self._row.transactional_id!r}"

    def drop(self) -> None:
        """Lets go of the session at once. The server rolls back what it had open."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not self._running:
            connection.pgconn.finish()
            return
        # Closed under a statement that still runs, its descriptor would stay with the loop, and be taken for
        # that of the next connection.
        with suppress(psycopg.Error):  # it is lost already
            hang_up(connection.fileno())
        ended = asyncio.gather(*self._running, return_exceptions=True)
        ended.add_done_callback(lambda _: connection.pgconn.finish())


async def end_backends(connection: AsyncConnection[TupleRow], backends: Sequence[Backend]) -> None:
    """Has the server end sessions of ours, if they are still there."""
    for backend in backends:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND "
            "backend_start = %s::timestamptz AND pid <> pg_backend_pid()",
            tuple(backend),
        )


def table_identifier(table: str) -> sql.Identifier:
    return sql.Identifier(*table.split("."))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _slot_row(
    transactional_id: str,
    name: str,
    slot: int,
    owner: int,
    cluster_id: str | None,
    producer_id: int | None,
    producer_epoch: int | None,
) -> SlotRow:
    return SlotRow(transactional_id, name, slot, owner, cluster_id, _pair(producer_id, producer_epoch))


def _pair(producer_id: int | None, producer_epoch: int | None) -> ProducerIdentity | None:
    if producer_id is None or producer_epoch is None:
        return None
    return ProducerIdentity(producer_id, producer_epoch)


def _slot(row: SlotRow) -> int:
    return row.slot
