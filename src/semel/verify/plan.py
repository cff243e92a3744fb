"""What a verification does: how many clients of which kind, over what, for how long, with which faults."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

UNITS_PER_LIFE: Final = 1_000_000
LIVES_PER_WORKER: Final = 10_000
TRANSACTION_TIMEOUT_MS: Final = 10_000


@dataclass(slots=True, frozen=True)
class Plan:
    """The choices of whoever runs it."""

    bootstrap: str
    producers: int = 4
    stages: int = 2
    partitions: int = 6
    round_s: float = 30.0
    kill_clients_every_s: float = 1.5
    """How often a client is killed with -9, on average; 0 is never."""
    cut_connections_every_s: float = 0.5
    """How often a client loses a connection with a request on it; 0 is never."""
    kill_command: str | None = None
    restart_command: str | None = None
    kill_broker_every_s: float = 5.0
    broker_kills: int | None = None
    """When so many are done the verification ends; None: when its time is over."""
    seed: int = 0


@dataclass(slots=True, frozen=True)
class Part:
    """What one worker process is told."""

    bootstrap: str
    kind: str
    """"producer" or "stage"."""
    worker: int
    life: int
    source_topic: str
    target_topic: str
    partitions: list[int]
    group: str
    transactional_id: str
    transaction_version: int
    cut_connections_every_s: float
    history: str
    seed: int

    @property
    def client(self) -> str:
        return f"{self.kind}-{self.worker}.{self.life}"

    @property
    def first_unit(self) -> int:
        """Units are numbered so that no two processes of a run share a number."""
        return (self.worker * LIVES_PER_WORKER + self.life) * UNITS_PER_LIFE

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Part:
        return Part(**json.loads(text))
