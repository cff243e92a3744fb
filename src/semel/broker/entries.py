"""The entries of the journal: every way in which the broker's state can change.

An entry is a kind and a body. The bodies are messages in the notation of the wire (`schema/entries.wire`),
but for the one on the hot path: an append is a fixed prefix and the batch, byte for byte as readers will
get it. Each entry belongs to exactly one *part* of the state (the catalog, or a partition); snapshots rely
on it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeAlias

from semel.broker.group_messages import (
    ConsumerGroupChanged,
    GroupDeleted,
    GroupSettled,
    OffsetsCommitted,
    OffsetsRemoved,
    TxnOffsetsEnded,
    TxnOffsetsPending,
)
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
from semel.broker.transaction_messages import (
    TransactionEnded,
    TransactionForgotten,
    TransactionIdentified,
    TransactionJoined,
)
from semel.errors import CorruptionError
from semel.wire.batch import BatchHeader, Buffer, read_header

_APPEND: Final = Struct("<B16si")
_APPEND_KIND: Final = 1
_MESSAGE: Final = Struct("<BB")


class Append:
    """A record batch, or a control batch, at the end of a partition."""

    __slots__ = ("batch", "header", "index", "topic_id")

    def __init__(self, topic_id: bytes, index: int, header: BatchHeader, batch: memoryview) -> None:
        self.topic_id = topic_id
        self.index = index
        self.header = header
        self.batch = batch


GroupEntry: TypeAlias = (
    GroupSettled
    | ConsumerGroupChanged
    | GroupDeleted
    | OffsetsCommitted
    | OffsetsRemoved
    | TxnOffsetsPending
    | TxnOffsetsEnded
)
"""An entry of a consumer group, which is named in its `group_id`."""
GROUP_ENTRIES: Final = (
    GroupSettled,
    ConsumerGroupChanged,
    GroupDeleted,
    OffsetsCommitted,
    OffsetsRemoved,
    TxnOffsetsPending,
    TxnOffsetsEnded,
)
TransactionEntry: TypeAlias = (
    TransactionIdentified | TransactionJoined | TransactionEnded | TransactionForgotten
)
"""An entry of a transaction, which is named in its `transactional_id`."""
TRANSACTION_ENTRIES: Final = (
    TransactionIdentified,
    TransactionJoined,
    TransactionEnded,
    TransactionForgotten,
)
Message: TypeAlias = (
    TopicCreated
    | TopicDeleted
    | PartitionsAdded
    | TopicConfigured
    | ProducerIdsReserved
    | EpochsUnsynced
    | LogStartMoved
    | ProducersExpired
    | QuotaSet
    | TransactionEntry
    | GroupEntry
)
Entry: TypeAlias = Append | Message

# Kinds are for ever: a journal written by any release must be readable by every later one.
_KINDS: Final[dict[int, type[Message]]] = {
    2: TopicCreated,
    3: TopicDeleted,
    4: PartitionsAdded,
    5: TopicConfigured,
    6: ProducerIdsReserved,
    7: LogStartMoved,
    8: ProducersExpired,
    9: QuotaSet,
    10: TransactionIdentified,
    11: TransactionJoined,
    12: TransactionEnded,
    13: TransactionForgotten,
    14: EpochsUnsynced,
    20: GroupSettled,
    21: GroupDeleted,
    22: OffsetsCommitted,
    23: OffsetsRemoved,
    24: TxnOffsetsPending,
    25: TxnOffsetsEnded,
    26: ConsumerGroupChanged,
}
_KIND_OF: Final[dict[type[Message], int]] = {message: kind for kind, message in _KINDS.items()}
_DISCARDS: Final = (_KIND_OF[TopicDeleted], _KIND_OF[LogStartMoved])


def encode_entry(entry: Entry) -> list[Buffer]:
    """The entry as the journal stores it; the bytes of a batch are not copied."""
    if isinstance(entry, Append):
        return [_APPEND.pack(_APPEND_KIND, entry.topic_id, entry.index), entry.batch]
    out = bytearray(_MESSAGE.pack(_KIND_OF[type(entry)], entry.MAX_VERSION))
    entry.encode(out, entry.MAX_VERSION, [])
    return [out]


def decode_discard(stored: memoryview) -> TopicDeleted | LogStartMoved | None:
    """The entry, if it is one that lets segments go."""
    if stored[0] not in _DISCARDS:
        return None
    entry = decode_entry(stored)
    assert isinstance(entry, TopicDeleted | LogStartMoved)
    return entry


def decode_entry(stored: memoryview) -> Entry:
    """The entry that `encode_entry` stored."""
    kind = stored[0]
    if kind == _APPEND_KIND:
        _, topic_id, index = _APPEND.unpack_from(stored)
        batch = stored[_APPEND.size :]
        return Append(topic_id, index, read_header(batch), batch)
    message = _KINDS.get(kind)
    if message is None:
        raise CorruptionError(f"the journal holds an entry of kind {kind}: it was written by a newer release")
    _, version = _MESSAGE.unpack_from(stored)
    return message.decode(stored, _MESSAGE.size, version)[0]
