"""What a database brings to the SQL sinks: connections, its way of saying things, its types and its errors.

A dialect is picklable (writers in other processes connect by themselves) and its `repr` shows no password.
Parameters are written `%s`. Statements that create or drop run at open only, never inside an epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from semel.sinks.sql.columns import Column, Layout, TableColumn
from semel.sinks.sql.names import TableName

if TYPE_CHECKING:
    import pyarrow as pa

SqlValue: TypeAlias = "str | int | float | bytes | bool | None"


class Part(NamedTuple):
    """Some whole rows, as the server reads them."""

    rows: int
    content: memoryview


class Form(ABC):
    """In which form rows go into one table: what a load sends, and in whose words.

    A session makes it, since it knows the server. It is picklable: writers elsewhere encode, and the session
    loads what they have made.
    """

    frame_rows: ClassVar[int] = 20_000
    """Rows for an owner elsewhere leave in frames of so many, so that it has something to load early. Each is
    a load: of much smaller ones the server has less.
    """

    @abstractmethod
    def parts(self, rows: "pa.Table") -> Iterator[Part]:
        """The rows, a part at a time. They have the form's columns, in order, under their names.

        Raises SqlFailure with Cause.ROW for what the form cannot say.
        """


class Loaded(NamedTuple):
    """What a bulk load sent: how many rows, in how many bytes, and how many the server says it took."""

    rows: int
    bytes: int
    taken: int


class SqlSession(ABC):
    """One connection. Outside `begin` … `commit`, each statement is a transaction. Raises SqlFailure only.

    After Cause.LOST or a cancellation it is fit for `close` only.
    """

    session_id: int
    """The server's number for this connection, by which another session can end it."""

    @abstractmethod
    async def execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        """Runs a statement, and says how many rows it changed."""

    @abstractmethod
    async def fetch(self, statement: str, parameters: Sequence[SqlValue] = ()) -> list[tuple[SqlValue, ...]]:
        """Runs a query."""

    @abstractmethod
    def form(self, table: TableName, columns: tuple[Column, ...], stamp: str | None) -> Form:
        """How this server is best given rows of these columns for that table.

        A stamp is what `WRITER_COLUMN` of every row gets.
        """

    @abstractmethod
    async def load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        """Loads rows in bulk; `form` is one that a session to this server has made.

        All rows are taken as they are, or it fails. Outside a transaction it is one of its own.
        """

    @abstractmethod
    async def begin(self) -> None: ...

    @abstractmethod
    async def commit(self) -> None:
        """Returns if the server has committed. LOST: it is not known. Any other failure: it has not."""

    @abstractmethod
    async def rollback(self) -> None: ...

    @abstractmethod
    async def set_lock_timeout(self, seconds: float) -> None:
        """How long later statements of this session wait for locks before Cause.LOCKED."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go, whatever the state; an open transaction is rolled back by the server. Never raises."""


class Dialect(ABC):
    """One database and how to talk to it."""

    boolean_type: str
    """The name of the type of DELETE_COLUMN; Arrow's bool can be loaded into it."""

    text_type: str
    """The name of a type for text of any length."""

    idle_timeout_s: float
    """After how much silence the server ends a session that has a transaction open."""

    @abstractmethod
    async def connect(self, label: str) -> SqlSession:
        """A new connection, with keepalives and time limits set, that shows `label` where the server can."""

    @abstractmethod
    def quote(self, name: str) -> str:
        """An identifier, quoted."""

    def quote_table(self, table: TableName) -> str:
        if table.schema is None:
            return self.quote(table.name)
        return f"{self.quote(table.schema)}.{self.quote(table.name)}"

    def quote_names(self, names: Iterable[str]) -> str:
        return ", ".join(self.quote(name) for name in names)

    # The catalogue, and types

    @abstractmethod
    async def describe(self, session: SqlSession, table: TableName) -> list[TableColumn]:
        """The table's columns; empty if there is no such table. Refuses tables without transactions."""

    @abstractmethod
    async def unique_keys(self, session: SqlSession, table: TableName) -> list[frozenset[str]]:
        """The sets of columns that are unique (whole, not partial or over expressions)."""

    @abstractmethod
    def refuses(self, arrow_type: "pa.DataType", type_name: str) -> str | None:
        """Why values of the Arrow type cannot go into a column of that type; None if they can."""

    @abstractmethod
    def type_for(self, arrow_type: "pa.DataType") -> str:
        """The column type for an Arrow type, for tables that we create; InitFailed if there is none."""

    # Tables of ours: all of these may run again and again

    @abstractmethod
    def create_bookkeeping(self) -> list[tuple[TableName, str]]:
        """SINKS_TABLE and DEAD_LETTERS_TABLE, each with the statement that makes it if it is not there."""

    @abstractmethod
    def create_target(self, table: TableName, columns: Sequence[TableColumn], keys: Sequence[str]) -> str:
        """The statement that makes the target table, if it is not there, with `keys` as its primary key."""

    @abstractmethod
    def create_stage(self, stage: TableName, columns: Sequence[Column], *, refuses_nulls: bool) -> str:
        """The statement that makes a staging table, if it is not there: the columns and WRITER_COLUMN.

        All columns may be null, or with `refuses_nulls` those that say so. WRITER_COLUMN is text of
        MAX_STAMP_CHARACTERS, compared byte by byte.
        """

    @abstractmethod
    async def stages(self, session: SqlSession, prefix: str) -> list[TableName]:
        """The tables, where the connection looks first, whose names begin with `prefix`."""

    @abstractmethod
    async def clear_stage(self, session: SqlSession, stage: TableName) -> None:
        """Empties it, the quickest way. Called in a transaction that has proved its owner; may end it.

        Never waits long for a writer that should be gone, but fails with Cause.LOCKED: the rows that stay are
        nobody's, and hurt nobody.
        """

    @abstractmethod
    def create_merge_table(self, layout: Layout) -> str:
        """The statement that makes MERGE_TABLE, seen by this session only, with `layout.staged`.

        It must be empty at the beginning of every epoch.
        """

    # What an epoch does

    @abstractmethod
    def insert_sink(self) -> str:
        """Inserts a row (sink_id) into SINKS_TABLE with owner 0 and epoch -1, unless it is there."""

    @abstractmethod
    def upsert(self, layout: Layout, winners: str) -> str:
        """Inserts or replaces by key what the query `winners` gives (the target's columns, in order)."""

    @abstractmethod
    def delete(self, layout: Layout, losers: str) -> str:
        """Deletes from the target the keys that the query `losers` gives (the key columns, in order)."""

    # Other sessions

    @abstractmethod
    async def is_alive(self, session: SqlSession, session_id: int, label: str) -> bool:
        """Whether that connection of ours is still there."""

    @abstractmethod
    async def waits_for(self, session: SqlSession, session_id: int) -> str:
        """What the server says that a connection of ours waits for, and what to do; empty if it does not."""

    @abstractmethod
    async def end_session(self, session: SqlSession, session_id: int, label: str) -> None:
        """Ends that connection, which rolls back its transaction. Nothing, if it is not there or not ours."""

    @abstractmethod
    async def end_writers(self, session: SqlSession, label_prefix: str) -> None:
        """Ends other connections whose label begins so, where the server shows labels; or does nothing."""
