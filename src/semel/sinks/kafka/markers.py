"""Where a Kafka sink keeps its marker, and who has signed it.

It is the committed offset of the group `<sink_id>.epoch` on partition 0 of the output topic: `epoch + 1`,
with a note that holds the rest. Whoever opens the sink signs it anew, so that the owner that it fenced can
tell who did it.
"""

import asyncio
import os
import socket
from typing import Final

from semel.client.cluster import Cluster
from semel.client.group_offsets import CommittedOffset, GroupMetadata, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction
from semel.client.transaction_admin import TransactionAdmin
from semel.errors import BrokerError, SemelError
from semel.sinks.errors import FencedOut, InitFailed
from semel.sinks.marker import NO_MARKER, Marker, Owner, decode_marker
from semel.wire.errors import ErrorCode

TRANSACTIONAL_ID_PREFIX: Final = "semel-sink."
MARKER_GROUP_SUFFIX: Final = ".epoch"
MARKER_PARTITION: Final = 0
# How long a fenced owner looks for the name of its successor, who signs within milliseconds.
SUCCESSOR_TIMEOUT_S: Final = 1.0
SUCCESSOR_POLL_S: Final = 0.1


def transactional_id_of(sink_id: str) -> str:
    return f"{TRANSACTIONAL_ID_PREFIX}{sink_id}"


def marker_group_of(sink_id: str) -> str:
    return f"{sink_id}{MARKER_GROUP_SUFFIX}"


class MarkerStore:
    """The marker of one sink."""

    def __init__(self, sink_id: str, topic: str) -> None:
        self.sink_id = sink_id
        self.group_id = marker_group_of(sink_id)
        self.where = TopicPartition(topic, MARKER_PARTITION)

    async def read(self, cluster: Cluster) -> tuple[Marker, Owner] | None:
        """The marker and who signed it; waits until no transaction has one pending."""
        committed = (await fetch_offsets(cluster, self.group_id, [self.where])).get(self.where)
        return None if committed is None else parse_marker(self.group_id, committed)

    async def peek(self, cluster: Cluster) -> Marker:
        """The marker as it is, whatever may be pending: for whoever must not wait for an open transaction."""
        where = self.where
        found = (await fetch_offsets(cluster, self.group_id, [where], require_stable=False)).get(where)
        return NO_MARKER if found is None else parse_marker(self.group_id, found)[0]

    async def put(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        """The marker becomes part of a transaction."""
        committed = CommittedOffset(marker.epoch + 1, marker.encode(owner))
        await transaction.commit_offsets(GroupMetadata(self.group_id), {self.where: committed})

    async def last_owner(self, cluster: Cluster, run: str) -> Owner | None:
        """Who has signed last, waiting a moment for a signature after this run's. None if nobody can tell."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + SUCCESSOR_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout_at(give_up_at):
                    found = await self.read(cluster)
            except (SemelError, TimeoutError):
                return None
            owner = None if found is None else found[1]
            if other_than(run, owner) is not None or loop.time() + SUCCESSOR_POLL_S > give_up_at:
                return owner
            await asyncio.sleep(SUCCESSOR_POLL_S)

    def fenced_out(self, successor: Owner | None, error: SemelError) -> FencedOut:
        who = "another owner" if successor is None else str(successor)
        return FencedOut(
            f"sink {self.sink_id!r} was fenced by {who}: stop this process; if it opened the sink again, it "
            f"would fence its successor. ({error})"
        )


def other_than(run: str, owner: Owner | None) -> Owner | None:
    """The owner, if it is known and of another run."""
    return owner if owner is not None and owner.run != run else None


def parse_marker(group_id: str, committed: CommittedOffset) -> tuple[Marker, Owner]:
    """The marker in an offset's note."""
    try:
        return decode_marker(committed.metadata)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InitFailed(
            f"group {group_id!r} holds an offset that is no marker of a sink: somebody else uses that group, "
            "or has reset it. Give the sink another name, or `semel sink adopt` it"
        ) from error


def is_alive(owner: Owner) -> bool:
    """Whether an owner is another process of this machine that still runs; of others nothing is known."""
    if owner.host != socket.gethostname() or owner.pid == os.getpid():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def has_open_transaction(cluster: Cluster, sink_id: str) -> bool:
    """Whether an owner, dead or alive, has an epoch open."""
    try:
        described = await TransactionAdmin(cluster).describe(transactional_id_of(sink_id))
    except BrokerError as error:
        if error.code != ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            raise
        return False
    return described.is_open
