"""The settings that all sinks share, with their limits."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from semel.errors import ConfigError

DEFAULT_COMMIT_TIMEOUT_S: Final = 30.0
DEFAULT_ABORT_TIMEOUT_S: Final = 10.0
DEFAULT_OPEN_TIMEOUT_S: Final = 180.0
DEFAULT_WRITE_TIMEOUT_S: Final = 300.0
DEFAULT_MAX_BUFFERED_ROWS: Final = 100_000

# A hook sees the number of an epoch that is about to be committed, and vetoes it by raising.
BeforeCommit: TypeAlias = Callable[[int], None]


class OnBadRow(Enum):
    """What becomes of a row that the target cannot take."""

    FAIL = "fail"
    DEAD_LETTER = "dead_letter"  # it is kept, with the reason, in the same transaction


@dataclass(slots=True, frozen=True)
class SinkSettings:
    """How long to wait, how much to hold, whom to ask.

    `max_buffered` rows make a writer flush inside the transaction; it is no error. `fence_on_open` False
    lets `open` fail where another owner is alive, in place of fencing it. `open_timeout` and `write_timeout`
    are for tables (Kafka has `transaction_timeout`): how long `open` may take, and how long the server may be
    silent when an epoch begins, or about the part of its rows that was sent last.
    """

    commit_timeout: float = DEFAULT_COMMIT_TIMEOUT_S
    abort_timeout: float = DEFAULT_ABORT_TIMEOUT_S
    max_buffered: int = DEFAULT_MAX_BUFFERED_ROWS
    fence_on_open: bool = True
    on_bad_row: OnBadRow = OnBadRow.FAIL
    before_commit: tuple[BeforeCommit, ...] = ()
    open_timeout: float = DEFAULT_OPEN_TIMEOUT_S
    write_timeout: float = DEFAULT_WRITE_TIMEOUT_S

    def __post_init__(self) -> None:
        if min(self.commit_timeout, self.abort_timeout, self.open_timeout, self.write_timeout) <= 0:
            raise ConfigError(
                "commit_timeout, abort_timeout, open_timeout and write_timeout are seconds above 0"
            )
        if self.max_buffered < 1:
            raise ConfigError("max_buffered is a number of rows of at least 1")
