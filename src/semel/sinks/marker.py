"""The marker: what a sink remembers, in the target itself, of the last epoch that it committed.

It is written in the transaction that makes the epoch visible, so the two can never disagree. With `last` the
marker's epoch, an epoch that is asked for is

- *next* (`last + 1`, and the same query): it is written;
- *committed* (`last`, and the same query and offsets): it is skipped, its rows are there;
- anything else: an error. The checkpoint was wiped, rolled back, copied or renamed, or the marker is gone. To
  skip would lose rows and to write would double them, so a person decides (`semel sink adopt`).

Without a marker only epoch 0 is next.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final, Self

from semel.sinks.errors import MarkerMismatch
from semel.sinks.receipts import Origin
from semel.sinks.source_group import source_group_of

ADOPT_HINT: Final = "`semel sink adopt` sets the marker once it is known which rows are there"
# Given by `adopt` in place of a query id: the next epoch's query takes the marker over.
ANY_QUERY: Final = "*"
# What stands for the run of an owner that is no sink, but a person at a command line.
BY_HAND: Final = "by hand"


@dataclass(slots=True, frozen=True)
class Owner:
    """Who has a sink open, for the message to whom it fences."""

    host: str
    pid: int
    run: str
    since: str

    @classmethod
    def here(cls, run: str) -> Self:
        """This process, from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), run, now)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run}, since {self.since})"


@dataclass(slots=True, frozen=True)
class Marker:
    """The last committed epoch, -1 where there is none yet, with its origin."""

    epoch: int
    query_id: str
    offsets_digest: str

    def encode(self, owner: Owner) -> str:
        return json.dumps({**asdict(self), "owner": asdict(owner)}, separators=(",", ":"))


NO_MARKER: Final = Marker(-1, "", "")


def decode_marker(text: str) -> tuple[Marker, Owner]:
    fields = json.loads(text)
    owner = Owner(**fields.pop("owner"))
    return Marker(**fields), owner


@dataclass(slots=True, frozen=True)
class Start:
    """What is to be begun with: the next epoch, its query (empty if that is new), and whether it is settled
    what the epoch reads."""

    epoch: int
    query_id: str
    is_planned: bool


class Verdict(Enum):
    NEXT = "next"
    COMMITTED = "committed"


def judge(sink_id: str, marker: Marker, epoch: int, origin: Origin) -> Verdict:
    """Whether an epoch is to be written or is there already; raises where the marker does not fit it."""
    same_query = marker.query_id in (origin.query_id, ANY_QUERY)
    if epoch == marker.epoch + 1 and (same_query or marker.epoch < 0):
        return Verdict.NEXT
    if epoch == marker.epoch and same_query:
        # An adopted marker knows no offsets: it is a person's word that the epoch is there.
        if marker.query_id == ANY_QUERY or marker.offsets_digest == origin.offsets_digest:
            return Verdict.COMMITTED
        group = source_group_of(sink_id)
        raise MarkerMismatch(
            f"sink {sink_id!r} committed epoch {epoch} from other source offsets than it is given now: the "
            f"checkpoint was rolled back or copied and has read on differently. Restore the newer one, or "
            f"let this epoch end where it was committed: group {group!r} at the source has the offsets. "
            f"`semel sink adopt` does not help: it would leave rows out, or double them"
        )
    raise MarkerMismatch(f"sink {sink_id!r} cannot take epoch {epoch}: {_why(marker, epoch, same_query)}")


def require_fit(sink_id: str, marker: Marker, start: Start) -> None:
    """Raises where the epoch cannot be next, whatever it is made from."""
    judge(sink_id, marker, start.epoch, Origin(start.query_id, marker.offsets_digest))
    if marker.epoch == start.epoch and marker.query_id == ANY_QUERY and not start.is_planned:
        raise MarkerMismatch(
            f"sink {sink_id!r} was told (adopt) that it has epoch {marker.epoch}, which nobody has planned "
            f"yet: it would be skipped, with rows that are in no target. `semel sink adopt` takes the last "
            f"epoch that is in the target: {marker.epoch - 1}, or less"
        )


def require_same_query(sink_id: str, marker: Marker, query_id: str) -> None:
    """Raises where the marker is of another query: no epoch that its owner may yet commit changes that."""
    if marker.epoch >= 0 and marker.query_id not in (query_id, ANY_QUERY):
        raise MarkerMismatch(f"sink {sink_id!r} is not taken: {_why(marker, 0, same_query=False)}")


def _why(marker: Marker, epoch: int, same_query: bool) -> str:
    if marker.epoch < 0:
        return (
            f"it has no marker, and epochs begin at 0. The marker was deleted or has expired, or the sink "
            f"was renamed. {ADOPT_HINT}"
        )
    if not same_query:
        return (
            f"its last epoch, {marker.epoch}, is of another query ({marker.query_id}): the checkpoint was "
            f"wiped or copied, or two pipelines have one name. Give this one its own name; or {ADOPT_HINT}"
        )
    if epoch <= marker.epoch:
        return f"it has committed epoch {marker.epoch} already: the checkpoint was rolled back. {ADOPT_HINT}"
    return (
        f"its last epoch is {marker.epoch}: the epochs between were never committed here, or the target was "
        f"restored from an older copy. {ADOPT_HINT}"
    )
