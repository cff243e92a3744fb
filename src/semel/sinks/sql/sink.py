"""A SQL table as a transactional sink: one SQL transaction an epoch, with the sink's row as fence and marker.

- `direct`: writers bring rows to the owner, wherever they are; with the first of them the transaction begins,
  and locks the row; `commit` writes the marker.
- `staged`: writers stage rows, each load a transaction of its own; `commit` locks the row, moves the rows
  of the receipts, checks their number and writes the marker, all in one transaction. Between epochs the
  stage is emptied.

The row's lock is what makes a lost connection safe: whoever gets it knows that the transaction before has
ended, one way or the other, and the epoch in the row says which. Every transaction compares the row's
`owner` with its own number first.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    ConnectionLost,
    FencedOut,
    InitFailed,
    SinkError,
    UnknownOutcome,
)
from semel.sinks.marker import Marker, Owner
from semel.sinks.receipts import Place, Receipt
from semel.sinks.service import ServiceAddress
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import TransactionalSink, WriterPlan
from semel.sinks.source_group import SourceOffsets
from semel.sinks.sql.columns import Layout, TableColumn, lay_out
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.failures import (
    Cause,
    NotEndedYet,
    SqlFailure,
    answered_within,
    expecting_stages,
    silence,
)
from semel.sinks.sql.intake import Intake
from semel.sinks.sql.intake_service import IntakeService, LocalIntake
from semel.sinks.sql.merge import Merge
from semel.sinks.sql.names import MERGE_TABLE, TableName, sink_key
from semel.sinks.sql.owner_connection import OwnerConnection
from semel.sinks.sql.sink_row import Holder, SinkRow, SinkRows
from semel.sinks.sql.stage import Stage, check_count, drop_stages
from semel.sinks.sql.tables import make_table
from semel.sinks.sql.target import Strategy, Target
from semel.sinks.sql.writers import DirectPlan, StagedPlan, stamp_of

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

# How long `open` waits for its predecessor to end its transaction before it ends it, and after that.
PREDECESSOR_GRACE_S: Final = 2.0
TAKE_TIMEOUT_S: Final = 30.0
MAX_TAKE_ATTEMPTS: Final = 4
# In which a server that has done the last statement of a client notices that the client is gone.
DEAD_HOLDER_GRACE_S: Final = 2.0
DEAD_HOLDER_POLL_S: Final = 0.05
# Who waits for what, if `open` takes too long, is asked on a connection of its own.
ASKING_LABEL: Final = "semel open"
ASKING_TIMEOUT_S: Final = 5.0
# A staged commit that lost a deadlock is tried again, so many times.
MAX_CONFLICTS: Final = 5
RECONNECT_BACKOFF_S: Final = 0.1
# An abort cuts a load, rolls back, and asks whose the sink is: each has so much of `abort_timeout`.
ABORT_STEPS: Final = 3
# How often an epoch whose writers are elsewhere says something to the server.
NUDGES_A_TIMEOUT: Final = 3
MAX_RECEIPTS: Final = 10_000


class SqlSink(TransactionalSink):
    """The part of a SQL sink that no database changes; `Dialect` is the rest."""

    def __init__(
        self,
        dialect: Dialect,
        target: Target,
        strategy: Strategy | None = None,
        settings: SinkSettings | None = None,
    ) -> None:
        super().__init__(settings)
        buries = self.settings.on_bad_row is OnBadRow.DEAD_LETTER
        if strategy is Strategy.DIRECT and buries:
            raise ConfigError(
                "on_bad_row 'dead_letter' needs strategy 'staged': with 'direct' a row that the database "
                "refuses has spoiled the one transaction"
            )
        self.target = target
        self.strategy = strategy or (Strategy.STAGED if buries else Strategy.DIRECT)
        self._is_strategy_given = strategy is not None
        self._dialect = dialect
        self._rows = SinkRows(dialect)
        self._connection = self._new_connection(Owner.here(self.run))
        self._layout: Layout | None = None
        self._merge: Merge | None = None
        self._stage: Stage | None = None
        self._intake = self._new_intake()
        self._service: IntakeService | None = None
        self._service_address: ServiceAddress | None = None
        self._has_begun = False
        self._waking: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._is_spoiled = False

    def _new_connection(self, owner: Owner) -> OwnerConnection:
        return OwnerConnection(self._dialect, self._rows, self.sink_id, owner, self.settings.commit_timeout)

    def _new_intake(self) -> Intake:
        return Intake(self._begun, self.settings.write_timeout)

    def expect(self, schema: "pa.Schema") -> None:
        """Says before `open` what the rows will look like, so that `open` can check it."""
        self.target = replace(self.target, schema=schema)

    def prefer(self, strategy: Strategy) -> None:
        """Says before `open` what suits the writers best, for a sink that was not told."""
        if not self._is_strategy_given and self.settings.on_bad_row is not OnBadRow.DEAD_LETTER:
            self.strategy = strategy

    # Open

    async def _open(self, owner: Owner) -> Marker:
        reason = None
        opening = asyncio.ensure_future(self._opened(owner))
        try:
            await asyncio.wait({opening}, timeout=self.settings.open_timeout)
            if not opening.done():
                reason = await self._why_open_waits()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        if reason is None:
            return opening.result()
        await self._close()
        raise InitFailed(
            f"sink {self.sink_id!r} could not be opened within {self.settings.open_timeout:g} s "
            f"(open_timeout of SinkSettings): {reason}",
            is_permanent=False,
        )

    async def _why_open_waits(self) -> str:
        """Asks while it waits; then ends that on the server, too: it would lock out the next `open`."""
        if self._connection.session is None:
            return "there is no connection yet"
        session_id = self._connection.session.session_id
        try:
            async with asyncio.timeout(ASKING_TIMEOUT_S):
                asking = await self._dialect.connect(ASKING_LABEL)
                try:
                    waits_for = await self._dialect.waits_for(asking, session_id)
                    await self._dialect.end_session(asking, session_id, self._connection.label)
                finally:
                    await asking.close()
        except (SqlFailure, TimeoutError):
            return "the server answers no other connection either. It is frozen, or has no room for more"
        if not waits_for:
            return f"the server does not say what its connection {session_id} waits for, or it is frozen"
        return f"the server says that its connection {session_id} waits for {waits_for}"

    async def _opened(self, owner: Owner) -> Marker:
        await self._close()
        self._intake = self._new_intake()  # it belongs to the loop that opens the sink
        self._connection = self._new_connection(owner)
        self._is_spoiled = False
        try:
            session = await self._connection.open()
            before = await self._read_row(session)
            self._check_before_fencing(before.marker)
            layout = self._layout = await self._check_target(session)
            await self._start_service()
            row = await self._take(session, before)
            await self._make_stages(session, layout)
        except SqlFailure as failure:
            await self._close()
            if failure.cause is Cause.LOST:
                raise ConnectionLost(f"sink {self.sink_id!r} could not be opened: {failure}") from failure
            raise InitFailed(
                f"sink {self.sink_id!r} could not be opened: {failure}", is_permanent=failure.is_permanent
            ) from failure
        except BaseException:
            await self._close()
            raise
        return row.marker

    async def _read_row(self, session: SqlSession) -> SinkRow:
        """The sink's row; made, with the tables, if it is not there."""
        for table, statement in self._dialect.create_bookkeeping():
            await make_table(self._dialect, session, table, statement)
        row = await self._rows.read(session, self.sink_id)
        if row is None:
            # Only then: an insert would wait, without a limit, for an owner that has written its marker.
            await self._rows.insert(session, self.sink_id)
            row = await self._rows.read(session, self.sink_id)
        if row is None:
            raise self._connection.fenced_by(row)
        return row

    async def _check_target(self, session: SqlSession) -> Layout:
        if self.target.create_table and self.target.schema is not None:
            statement = self._create_target(self.target.schema)
            await make_table(self._dialect, session, self.target.table, statement)
        found = await self._dialect.describe(session, self.target.table)
        if not found:
            raise InitFailed(
                f"there is no table {self.target.table}, or this user may not see it: make it, or give "
                f"create_table=True and schema="
            )
        layout = lay_out(self.target, found, self._dialect)
        if layout.merges:
            unique = await self._dialect.unique_keys(session, self.target.table)
            if frozenset(layout.keys) not in unique:
                raise InitFailed(
                    f"table {self.target.table} has no primary key or unique constraint on exactly "
                    f"({', '.join(layout.keys)}): without it rows of one key cannot be replaced"
                )
        return layout

    def _create_target(self, schema: "pa.Schema") -> str:
        mapping = self.target.columns or {
            name: name for name in schema.names if name != self.target.change_column
        }
        keys = [mapping[key] for key in self.target.keys if key in mapping]
        columns = [
            TableColumn(name, self._dialect.type_for(schema.field(source).type), name not in keys)
            for source, name in mapping.items()
        ]
        return self._dialect.create_target(self.target.table, columns, keys)

    async def _take(self, session: SqlSession, before: SinkRow) -> SinkRow:
        """Raises the row's owner. Waits a little for the transaction of the owner before, then ends it.

        Only from the number that was read when `open` began: who was asleep since then, and finds another
        owner, is the older one.
        """
        if before.holder is not None:
            await self._consider(session, before.holder)
        self._connection.owner_number = before.owner + 1
        for attempt in range(MAX_TAKE_ATTEMPTS):
            await session.set_lock_timeout(PREDECESSOR_GRACE_S if attempt == 0 else TAKE_TIMEOUT_S)
            try:
                is_taken = await self._rows.take(session, before, self._connection.holder(session))
            except SqlFailure as failure:
                if failure.cause not in (Cause.LOCKED, Cause.CONFLICT):
                    raise
                await self._end_predecessor(session)
                continue
            row = await self._rows.read(session, self.sink_id)
            if not is_taken or row is None or row.owner != self._connection.owner_number:
                raise await self._not_taken(session, row)
            await session.set_lock_timeout(self.settings.commit_timeout)
            await self._end_writers(session)
            return row
        raise InitFailed(
            f"sink {self.sink_id!r} could not be taken: another transaction keeps its row in "
            f"semel_sinks locked. If it is being rolled back, which may take as long as writing it did, try "
            f"again later; else find it in the server's list of sessions and end it",
            is_permanent=False,
        )

    async def _not_taken(self, session: SqlSession, row: SinkRow | None) -> SinkError:
        """Another one has the sink; or nobody, if that one has died while it waited for the row.

        A server that has a client wait for a lock does not look whether it is still there, and makes it the
        owner all the same.
        """
        if row is None or row.holder is None or await self._stays(session, row.holder):
            return self._connection.fenced_by(row)
        return InitFailed(
            f"sink {self.sink_id!r} was taken by {row.holder.owner} meanwhile, which has died or closed it "
            f"since: open it again",
            is_permanent=False,
        )

    async def _stays(self, session: SqlSession, holder: Holder) -> bool:
        deadline = time.monotonic() + DEAD_HOLDER_GRACE_S
        while await self._dialect.is_alive(session, holder.session_id, holder.label):
            if time.monotonic() >= deadline:
                return True
            await asyncio.sleep(DEAD_HOLDER_POLL_S)
        return False

    async def _consider(self, session: SqlSession, holder: Holder) -> None:
        if self.settings.fence_on_open:
            return
        if await self._stays(session, holder):
            raise InitFailed(
                f"sink {self.sink_id!r} is open in {holder.owner}, and fence_on_open is "
                f"off: stop that one first",
                is_permanent=False,
            )

    async def _end_predecessor(self, session: SqlSession) -> None:
        row = await self._rows.read(session, self.sink_id)
        if row is not None and row.holder is not None:
            log.warning(
                "sink %s: ending the connection of its owner before, %s", self.sink_id, row.holder.owner
            )
            await self._dialect.end_session(session, row.holder.session_id, row.holder.label)

    async def _end_writers(self, session: SqlSession) -> None:
        """Writers of earlier runs cannot do harm, but they hold locks on the stage."""
        if self.strategy is Strategy.STAGED:
            await self._dialect.end_writers(session, self._writers_prefix)

    async def _make_stages(self, session: SqlSession, layout: Layout) -> None:
        if self.strategy is Strategy.DIRECT:
            source = TableName(None, MERGE_TABLE)
            await drop_stages(self._dialect, session, self.sink_id, owner=self._connection)
            if layout.merges:
                self._connection.preparation = self._dialect.create_merge_table(layout)
                await session.execute(self._connection.preparation)
        else:
            # Where bad rows are kept aside, the stage is to find them; else the table's triggers come first.
            refuses_nulls = self.settings.on_bad_row is OnBadRow.DEAD_LETTER
            self._stage = Stage(self._dialect, self.sink_id, layout, refuses_nulls=refuses_nulls)
            source = self._stage.rows
            await self._stage.make(self._connection, session)
            await self._sweep()
        self._merge = Merge(self._dialect, layout, source)

    async def _start_service(self) -> None:
        if self.strategy is Strategy.DIRECT and self._shared_host is not None:
            self._service = IntakeService(self._intake)
            self._service_address = await self._service.start(self._shared_host)

    # Begin

    async def _begin(self, place: Place) -> WriterPlan:
        self._is_spoiled = self._has_begun = False
        try:
            session = await self._ready()
            if self.strategy is Strategy.STAGED:
                return self._staged_plan(place)
            return self._direct_plan(place, session)
        except SqlFailure as failure:
            await self._connection.drop()
            # Locked, as long as the server rolls back what was on a connection that was given up.
            if failure.cause in (Cause.LOST, Cause.LOCKED):
                raise ConnectionLost(f"epoch {place.epoch} could not be begun: {failure}") from failure
            raise BeginFailed(f"epoch {place.epoch} could not be begun: {failure}") from failure
        except BaseException:
            await self._connection.drop()
            raise

    async def _ready(self) -> SqlSession:
        """Waits within `write_timeout`: for the stage, and for what is rolled back of an epoch before."""
        timeout = self.settings.write_timeout
        ending: NotEndedYet | None = None
        try:
            async with asyncio.timeout(timeout):
                await self._swept()
                while True:
                    try:
                        return await self._connection.get_session()
                    except NotEndedYet as failure:
                        ending = failure
                        log.info("sink %s: waits for its own lost connection: %s", self.sink_id, failure)
        except TimeoutError as error:
            if ending is None:
                raise silence(timeout) from error
            raise SqlFailure(
                f"{ending}. It was waited for {timeout:g} s (write_timeout of SinkSettings)",
                Cause.LOST,
            ) from error

    def _direct_plan(self, place: Place, session: SqlSession) -> WriterPlan:
        assert self._layout is not None
        table = TableName(None, MERGE_TABLE) if self._layout.merges else self._layout.table
        form = session.form(table, self._layout.staged, None)
        self._intake.open(place, form)
        return DirectPlan(
            self.sink_id,
            place,
            self._layout,
            self._dialect,
            self.target.schema,
            self.metrics,
            self.settings.max_buffered,
            form,
            self._service_address,
            LocalIntake(self._intake),
        )

    def _staged_plan(self, place: Place) -> WriterPlan:
        assert self._layout is not None and self._stage is not None
        buries = self.settings.on_bad_row is OnBadRow.DEAD_LETTER
        return StagedPlan(
            self.sink_id,
            place,
            self._layout,
            self._dialect,
            self.target.schema,
            self.metrics,
            self.settings.max_buffered,
            self._stage.rows,
            self._stage.dead_letters if buries else None,
            f"{self._writers_prefix}{place.run}:{place.epoch}",
            self.settings.write_timeout,
        )

    async def _begun(self) -> SqlSession:
        """The connection with the epoch's transaction, which begins here if it has not."""
        if self._has_begun and self._connection.session is not None:
            return self._connection.session
        try:
            session = await self._begin_transaction()
        except FencedOut as error:
            raise self._fail(error) from error
        self._has_begun = True
        if self._service is not None:
            self._waking = asyncio.create_task(self._stay_awake(session))
        return session

    async def _stay_awake(self, session: SqlSession) -> None:
        """Writers elsewhere may compute for long between two loads, and the last of them alone."""
        while True:
            await asyncio.sleep(self._dialect.idle_timeout_s / NUDGES_A_TIMEOUT)
            # Not to be cancelled in the midst of it: that would cut the connection.
            await asyncio.shield(asyncio.ensure_future(self._intake.nudge(session)))

    def _let_sleep(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None

    async def _begin_transaction(self) -> SqlSession:
        """A connection that was lost since the last epoch is made again: nothing was on it."""
        for is_last in (False, True):
            try:
                async with answered_within(self.settings.write_timeout):
                    session = await self._connection.get_session()
                    await self._connection.lock_row(session)
                return session
            except SqlFailure as failure:
                await self._connection.drop()
                if is_last or failure.cause is not Cause.LOST:
                    raise
        raise AssertionError("the last try raises")

    # Commit

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        deadline = time.monotonic() + self.settings.commit_timeout
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self.settings.commit_timeout):
                session = await self._prepared(marker, receipts)
        except TimeoutError as error:
            await self._intake.cut()
            await self._spoil()
            raise CommitFailed(
                f"epoch {marker.epoch} was not ready to commit within {self.settings.commit_timeout:g} s "
                f"(commit_timeout of SinkSettings). What an upsert or a stage has to move into the table is "
                f"part of that: raise it, or make epochs smaller (maxOffsetsPerTrigger)"
            ) from error
        except SqlFailure as failure:
            await self._spoil()
            if failure.cause is Cause.LOST:
                await self._refuse_if_fenced()
            raise CommitFailed(
                f"epoch {marker.epoch} was not committed: {failure}", is_permanent=failure.is_permanent
            ) from failure
        except SinkError:
            await self._spoil()
            raise
        await self._send_commit(session, marker, deadline)

    async def _prepared(self, marker: Marker, receipts: list[Receipt]) -> SqlSession:
        """Everything but COMMIT: rows and marker are in one open transaction of the session returned."""
        if self.strategy is Strategy.DIRECT:
            return await self._prepare_direct(marker, receipts)
        conflicts = 0
        while True:
            try:
                return await self._prepare_staged(marker, receipts)
            except SqlFailure as failure:
                conflicts += failure.cause is Cause.CONFLICT
                if failure.cause not in (Cause.CONFLICT, Cause.LOST) or conflicts > MAX_CONFLICTS:
                    raise
                # What was staged is still there, or its number will tell that it is not.
                await self._connection.drop()
                await asyncio.sleep(RECONNECT_BACKOFF_S)

    async def _prepare_direct(self, marker: Marker, receipts: list[Receipt]) -> SqlSession:
        assert self._merge is not None and self._layout is not None
        await self._intake.close()
        self._intake.check_covered(receipts)
        if self._is_spoiled or (self._has_begun and self._connection.session is None):
            raise CommitFailed(f"epoch {marker.epoch} has lost its transaction: abort it and run it again")
        session = await self._begun()
        self._let_sleep()
        if self._layout.merges:
            promised = sum(receipt.rows for receipt in receipts)
            check_count(await self._merge.move(session, None), promised, self._layout.table)
        await self._mark(session, marker)
        return session

    async def _prepare_staged(self, marker: Marker, receipts: list[Receipt]) -> SqlSession:
        assert self._merge is not None and self._stage is not None
        if len(receipts) > MAX_RECEIPTS:
            raise CommitFailed(
                f"an epoch has at most {MAX_RECEIPTS:,} writers: use fewer partitions", is_permanent=True
            )
        session = await self._connection.get_session()
        await self._connection.lock_row(session)
        stamps = [
            stamp_of(receipt.place, receipt.task, receipt.attempt) for receipt in receipts if receipt.rows
        ]
        with expecting_stages(self._stage.rows, self._stage.dead_letters):
            if stamps:
                moved = await self._merge.move(session, stamps)
                check_count(moved, sum(receipt.rows for receipt in receipts), self._stage.rows)
            await self._stage.move_dead_letters(session, receipts)
        await self._mark(session, marker)
        return session

    async def _mark(self, session: SqlSession, marker: Marker) -> None:
        owner_number, last_epoch = self._connection.owner_number, self._marker.epoch
        if await self._rows.mark(session, self.sink_id, owner_number, marker, last_epoch):
            return
        row = await self._rows.read(session, self.sink_id)
        if row is not None and row.holder is not None and row.holder.owner.run == self.run:
            raise FencedOut(
                f"the marker of sink {self.sink_id!r} is at epoch {row.marker.epoch} and not at "
                f"{last_epoch}: it was changed by hand while it was open, or the server has lost what was "
                f"committed (restored, failed over); restart this instance, which tells what to do"
            )
        raise self._connection.fenced_by(row)

    async def _send_commit(self, session: SqlSession, marker: Marker, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await session.commit()
        except TimeoutError:
            await self._resolve(marker, deadline)
        except SqlFailure as failure:
            if failure.cause is not Cause.LOST:
                await self._spoil()
                raise CommitFailed(
                    f"epoch {marker.epoch} was not committed: {failure}", is_permanent=failure.is_permanent
                ) from failure
            await self._resolve(marker, deadline)
        if self.strategy is Strategy.STAGED:
            self._start_sweep()

    async def _resolve(self, marker: Marker, deadline: float) -> None:
        """COMMIT was sent and no answer came: the row, once it can be locked, tells what has become of it."""
        while time.monotonic() < deadline:
            await self._connection.drop()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    session = await self._connection.get_session()
                    row = await self._connection.lock_row(session)
                    await session.rollback()
            except TimeoutError:
                break
            except SqlFailure as failure:
                log.info(
                    "sink %s: the outcome of epoch %d is not known yet: %s",
                    self.sink_id,
                    marker.epoch,
                    failure,
                )
                await asyncio.sleep(RECONNECT_BACKOFF_S)
                continue
            if row.marker.epoch == marker.epoch:
                return
            self._is_spoiled = True
            raise CommitFailed(
                f"the connection was lost while epoch {marker.epoch} was committed, and the server has "
                f"rolled it back: abort it and run it again"
            )
        await self._connection.drop()
        raise UnknownOutcome(
            f"the connection was lost while epoch {marker.epoch} of sink {self.sink_id!r} was committed, and "
            f"the server did not tell within {self.settings.commit_timeout:g} s: open the sink anew to know"
        )

    async def _spoil(self) -> None:
        """After a failed commit the transaction is gone; what was staged is not."""
        self._is_spoiled = self.strategy is Strategy.DIRECT
        await self._connection.drop()

    # Abort

    async def _abort(self) -> None:
        try:
            if self.strategy is Strategy.STAGED:
                self._start_sweep()
                return
            self._let_sleep()
            await self._intake.cut()
            session = self._connection.session
            if session is not None and not self._is_spoiled:
                if self._has_begun:
                    await self._roll_back(session)
                return
            await self._refuse_if_fenced()
        except SqlFailure as failure:
            await self._connection.drop()
            if failure.cause is not Cause.LOST:
                raise AbortFailed(f"the epoch's transaction was not rolled back: {failure}") from failure
            await self._refuse_if_fenced()

    async def _roll_back(self, session: SqlSession) -> None:
        """Of many rows that takes long, and the server does it without us: nobody can commit them now."""
        try:
            async with asyncio.timeout(self.settings.abort_timeout / ABORT_STEPS):
                await session.rollback()
        except TimeoutError:
            await self._connection.drop()

    async def _refuse_if_fenced(self) -> None:
        """Raises FencedOut if that is why the connection is gone. A server that is away is asked once.

        So is one that still rolls back what was on that connection, and keeps the sink's row locked until
        then: the next epoch begins with the same question, and waits for longer.
        """
        try:
            async with asyncio.timeout(self.settings.abort_timeout / ABORT_STEPS):
                await self._connection.get_session()
        except (SqlFailure, TimeoutError) as failure:
            log.info("sink %s: whose it is will be asked again: %r", self.sink_id, failure)
            await self._connection.drop()

    async def _close(self) -> None:
        if self._service is not None:
            await self._service.stop()
            self._service = self._service_address = None
        self._let_sleep()
        await self._intake.cut()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
            self._sweeping = None
        await self._connection.drop()

    # The stage between epochs

    def _start_sweep(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())

    async def _swept(self) -> None:
        """Waits for the stage to be empty; raises what went wrong if it concerns the next epoch."""
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            await sweeping

    async def _sweep(self) -> None:
        """Empties the stage, if it is still ours: a zombie must not empty its successor's."""
        assert self._stage is not None
        try:
            session = await self._connection.get_session()
            for table in (self._stage.rows, self._stage.dead_letters):
                await self._clear(session, table)
        except SqlFailure as failure:
            log.info("sink %s: the stage was not emptied, later: %s", self.sink_id, failure)
            await self._connection.drop()

    async def _clear(self, session: SqlSession, table: TableName) -> None:
        await self._connection.lock_row(session)
        try:
            await self._dialect.clear_stage(session, table)
        except SqlFailure as failure:
            if failure.cause is not Cause.LOCKED:
                raise
            # A writer of an epoch that is over. Nobody waits for it, and its rows are nobody's.
            await session.rollback()
            await self._connection.lock_row(session)
            await self._dialect.end_writers(session, self._writers_prefix)
            await self._dialect.clear_stage(session, table)
        await session.commit()

    @property
    def _writers_prefix(self) -> str:
        return f"semel-writer:{sink_key(self.sink_id)}:"
