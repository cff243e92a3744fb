"""The settings of transactions over a topic and a database, with their limits, and what is counted."""

import re
from dataclasses import dataclass, field
from typing import Final

from semel.errors import ConfigError
from semel.sinks.metrics import Latency

DEFAULT_POOL: Final = 4
MAX_POOL: Final = 100
MAX_NAME_CHARACTERS: Final = 200
TABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


@dataclass(slots=True, frozen=True)
class AtomicSettings:
    """Times are seconds.

    `begin_timeout`: how long `begin` waits for a free slot. `commit_timeout`: how long a commit may take
    before its outcome is said to be unknown. `idle_timeout`: the server ends a session that stays silent for
    so long in the middle of a transaction. `fence_timeout`: how long `open` waits for a predecessor that is
    about to commit, before it has the server end its session.
    """

    begin_timeout: float = 30.0
    commit_timeout: float = 30.0
    idle_timeout: float = 60.0
    fence_timeout: float = 5.0
    table: str = "semel_transactions"

    def __post_init__(self) -> None:
        if min(self.begin_timeout, self.commit_timeout, self.idle_timeout, self.fence_timeout) <= 0:
            raise ConfigError("begin_timeout, commit_timeout, idle_timeout and fence_timeout are above 0")
        if TABLE_NAME.fullmatch(self.table) is None:
            raise ConfigError(f"{self.table!r} is no name of a table, perhaps with its schema")


@dataclass(slots=True)
class AtomicMetrics:
    """Counted since this object was made."""

    commits: int = 0
    aborts: int = 0
    failures: int = 0
    mended: int = 0
    recovered_commits: int = 0
    recovered_aborts: int = 0
    commit_latency: Latency = field(default_factory=Latency)


def check_name(name: str, pool: int) -> None:
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"a name has 1 to {MAX_NAME_CHARACTERS} characters")
    if not 1 <= pool <= MAX_POOL:
        raise ConfigError(f"a pool has 1 to {MAX_POOL} slots: one for each transaction at a time")
