"""The broker's whole state, and the only way it changes: `apply`.

Handlers look at this state and decide (`Decision`); `apply` makes an entry true. A restart applies the same
entries again, so the state is a pure function of the journal. What an entry means outside the core, such as
bytes to store or files to delete, comes back as an `Effect`, which the server carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from semel.broker.configs import BrokerSetting
from semel.broker.counters import Counters
from semel.broker.deadlines import Deadlines
from semel.broker.entries import GROUP_ENTRIES, Append, Entry
from semel.broker.groups.registry import Groups
from semel.broker.groups.settings import GroupSettings
from semel.broker.journal_messages import (
    EpochsUnsynced,
    LogStartMoved,
    PartitionsAdded,
    ProducerIdsReserved,
    ProducersExpired,
    QuotaSet,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
)
from semel.broker.limit_warnings import LimitWarnings
from semel.broker.producer_ids import ProducerIds
from semel.broker.quotas import Quotas
from semel.broker.topics import Catalog, Partition, Topic
from semel.broker.transaction_messages import (
    TransactionEnded,
    TransactionForgotten,
    TransactionIdentified,
    TransactionJoined,
)
from semel.broker.transactions.hearing import Hearing
from semel.broker.transactions.state import Transactions
from semel.log.partition import AbortedTransaction
from semel.wire.records import read_end_marker


class Appended:
    """A batch has a place at the end of a partition: store it, and show it once it is durable."""

    __slots__ = ("aborted", "batch_entry", "ended_first_offset", "partition")

    def __init__(
        self,
        partition: Partition,
        batch_entry: Append,
        aborted: AbortedTransaction | None,
        ended_first_offset: int,
    ) -> None:
        self.partition = partition
        self.batch_entry = batch_entry
        self.aborted = aborted
        self.ended_first_offset = ended_first_offset
        """First offset of the transaction that this marker ends, or -1."""


@dataclass(slots=True, frozen=True)
class StartMoved:
    """The partition now begins later: what lies below may be deleted."""

    partition: Partition
    log_start_offset: int


@dataclass(slots=True, frozen=True)
class Dropped:
    """The topic is gone: its files may be deleted."""

    topic: Topic


Effect: TypeAlias = Appended | StartMoved | Dropped


@dataclass(slots=True, frozen=True)
class Identity:
    """Who this broker is to its clients."""

    cluster_id: str
    node_id: int


@dataclass(slots=True, frozen=True)
class Limits:
    """What the core refuses to grow beyond, and its answers where a client leaves something open."""

    default_partitions: int = 1
    max_partitions: int = 20_000
    auto_create_topics: bool = True
    max_transaction_timeout_ms: int = 900_000
    max_transaction_partitions: int = 10_000
    max_open_transactions: int = 100_000
    """For each principal."""
    max_transactional_ids: int = 250_000
    transactional_id_expiration_ms: int = 7 * 24 * 60 * 60 * 1000
    two_phase_commit: bool = False


class Broker:
    """Topics, partitions, producers, transactions and groups, as applied so far."""

    def __init__(
        self,
        leader_epoch: int,
        *,
        identity: Identity,
        limits: Limits,
        group_settings: GroupSettings | None = None,
        topic_defaults: Mapping[str, str],
        settings: Sequence[BrokerSetting],
        new_id: Callable[[], bytes],
        counters: Counters | None = None,
        hearing: Hearing | None = None,
    ) -> None:
        self.leader_epoch = leader_epoch
        self.identity = identity
        self.limits = limits
        self.settings = settings
        self.new_id = new_id
        self.counters = counters or Counters()
        self.hearing = hearing or Hearing()
        self.catalog = Catalog(topic_defaults)
        self.producer_ids = ProducerIds()
        self.quotas = Quotas()
        self.transactions = Transactions()
        self.transaction_deadlines: Deadlines[str] = Deadlines()
        self.limit_warnings = LimitWarnings()
        self.groups = Groups(group_settings or GroupSettings())
        self.catalog_stamp = 0
        """The journal position that a loaded snapshot of the catalog covers."""

    def apply(self, entry: Entry) -> Effect | None:
        """Make `entry` true."""
        if isinstance(entry, Append):
            return self._append(entry)
        if isinstance(entry, GROUP_ENTRIES):
            self.groups.apply(entry)
            return None
        match entry:
            case TopicCreated():
                configs = {config.name: config.value for config in entry.configs}
                self.catalog.create(entry.name, entry.topic_id, entry.partitions, configs)
            case TopicDeleted():
                topic = self.catalog.delete(entry.topic_id)
                return None if topic is None else Dropped(topic)
            case PartitionsAdded():
                self.catalog.grow(entry.topic_id, entry.count)
            case TopicConfigured():
                self.catalog.configure(
                    entry.topic_id, {config.name: config.value for config in entry.configs}
                )
            case ProducerIdsReserved():
                self.producer_ids.reserve(entry.end_id)
            case EpochsUnsynced():
                self.producer_ids.epochs_unsynced = True
            case LogStartMoved():
                return self._move_start(entry)
            case ProducersExpired():
                partition = self.catalog.partition_by_id(entry.topic_id, entry.index)
                if partition is not None:
                    partition.log.forget_producers(entry.producer_ids)
            case QuotaSet():
                self.quotas.set(entry)
            case TransactionIdentified():
                self.transactions.identify(entry)
            case TransactionJoined():
                self.transactions.join(entry)
            case TransactionEnded():
                self.transactions.end(entry)
            case TransactionForgotten():
                self.transactions.forget(entry)
        return None

    def _append(self, entry: Append) -> Appended | None:
        partition = self.catalog.partition_by_id(entry.topic_id, entry.index)
        if partition is None:
            return None  # Replay of an append to a topic that the snapshot knows to be deleted.
        header = entry.header
        marker = read_end_marker(entry.batch) if header.is_control else None
        if marker is None:
            partition.log.append(header)
            return Appended(partition, entry, None, -1)
        first_offset = partition.log.open_transactions.get(header.producer_id, -1)
        aborted = partition.log.append_marker(header, marker.coordinator_epoch, marker.commit)
        return Appended(partition, entry, aborted, first_offset)

    def _move_start(self, entry: LogStartMoved) -> StartMoved | None:
        partition = self.catalog.partition_by_id(entry.topic_id, entry.index)
        if partition is None:
            return None
        partition.log.move_start(entry.log_start_offset)
        return StartMoved(partition, partition.log.log_start_offset)
