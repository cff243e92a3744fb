"""A failed statement, sorted by what it means. Sessions raise it; sinks make a SinkError of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Final

from semel.sinks.sql.names import TableName


class Cause(Enum):
    LOST = "the connection is gone"
    LOCKED = "another transaction holds a lock for too long"
    CONFLICT = "the server chose this transaction to end a deadlock or to keep others serializable"
    ROW = "a row breaks a type or a constraint"
    REFERENCE = "a row refers to another one that is not there: it may come"
    DENIED = "permission was refused"
    MISSING = "a table, a column or a session is not there"
    OTHER = "something else"


# Who is to blame is a row, and not the server or another transaction.
OF_A_ROW: frozenset[Cause] = frozenset({Cause.ROW, Cause.REFERENCE})
# The same statement would fail again.
PERMANENT: frozenset[Cause] = frozenset({Cause.ROW, Cause.DENIED, Cause.MISSING})

# What the user may do about a row.
MEND: Final = (
    "Mend the rows; or have those that do not fit their columns kept as dead letters, with "
    "SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)"
)


class SqlFailure(Exception):  # noqa: N818 - it is for this package, which turns it into a SinkError
    """What the server said; the transaction, if there was one, is to be rolled back.

    `reason` is that alone. As a text it also says what may be done about a row.
    """

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.reason}. {MEND}" if self.cause is Cause.ROW else self.reason

    @property
    def is_permanent(self) -> bool:
        return self.cause in PERMANENT


class NotEndedYet(SqlFailure):
    """A connection of this owner was given up and is still there: the server may be rolling back for long."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Cause.LOST)


@contextmanager
def expecting_stages(*stages: TableName | None) -> Iterator[None]:
    """A stage that is gone is made anew by the next `open`; only a target that is gone is gone for good."""
    try:
        yield
    except SqlFailure as failure:
        # Every server names what is missing, in whatever language.
        is_stage = any(stage is not None and stage.name in failure.reason for stage in stages)
        if failure.cause is not Cause.MISSING or not is_stage:
            raise
        raise SqlFailure(
            f"a staging table was dropped while the sink was open: {failure.reason}. Opening the sink anew "
            f"makes it again",
            Cause.OTHER,
        ) from failure


@asynccontextmanager
async def answered_within(write_timeout: float) -> AsyncIterator[None]:
    """What is asked inside is given up after that time, with its connection."""
    try:
        async with asyncio.timeout(write_timeout):
            yield
    except TimeoutError as error:
        raise silence(write_timeout) from error


def silence(write_timeout: float) -> SqlFailure:
    return SqlFailure(
        f"the server has been silent for {write_timeout:g} s (write_timeout of SinkSettings): it is frozen, "
        f"or waits for a disk, a trigger or a standby",
        Cause.LOST,
    )
