"""Fetch (1): read batches up to the high watermark or the last stable offset, and wait while there are
none.

A fetch starts when it is the first in its connection's line, so that a client holds at most one answer full
of records in memory. If fewer than `min_bytes` are there it parks: it watches its partitions, and is
answered when one of them has news or when `max_wait_ms` is over. What it reads is durable by construction,
so it never waits for the disk.
"""

from __future__ import annotations

import asyncio
from typing import Final

from semel.broker.core import Broker
from semel.broker.leader_epochs import refuses_epoch
from semel.broker.quotas import Quotas
from semel.broker.topics import Partition
from semel.log.partition import PartitionLog
from semel.server.connection import Slot
from semel.server.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    Asked,
    FetchSession,
    FetchSessions,
    asked_for,
)
from semel.server.life import Life
from semel.server.quotas import ClientMeters
from semel.storage.segment import Region
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)

READ_COMMITTED: Final = 1
MAX_WAIT_MS: Final = 300_000
_BY_ID: Final = 13


class Fetcher:
    """Answers fetches from the life of the moment."""

    def __init__(self, max_bytes: int, sessions: FetchSessions, meters: ClientMeters) -> None:
        self.max_bytes = max_bytes
        self.sessions = sessions
        self.meters = meters
        self.life: Life | None = None

    def fetch(self, slot: Slot, request: FetchRequest, now_ms: int) -> None:
        """Find out what is asked for, and start reading when it is this request's turn."""
        if request.replica_id >= 0 or (
            request.replica_state is not None and request.replica_state.replica_id >= 0
        ):
            slot.answer(FetchResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED))
            return
        by_id = slot.header.api_version >= _BY_ID
        session: FetchSession | None = None
        if request.session_epoch == FINAL_EPOCH:
            if request.session_id != NO_SESSION:
                self.sessions.close(request.session_id)
            asked = asked_for(request)
        elif request.session_epoch == INITIAL_EPOCH:
            session = self.sessions.open(request, by_id, now_ms)
            asked = asked_for(request) if session is None else list(session.partitions.values())
        else:
            found = self.sessions.go_on(request, by_id, now_ms)
            if isinstance(found, ErrorCode):
                slot.answer(FetchResponse(error_code=found))
                return
            session = found
            asked = list(session.partitions.values())
        pending = PendingFetch(self, slot, request, session, asked, by_id)
        slot.when_first(pending.start)


class PendingFetch:
    """One fetch, from its turn until its answer."""

    __slots__ = (
        "_asked",
        "_by_id",
        "_fetcher",
        "_life",
        "_request",
        "_session",
        "_slot",
        "_timer",
        "_watched",
        "_woken",
    )

    def __init__(
        self,
        fetcher: Fetcher,
        slot: Slot,
        request: FetchRequest,
        session: FetchSession | None,
        asked: list[Asked],
        by_id: bool,
    ) -> None:
        self._fetcher = fetcher
        self._slot = slot
        self._request = request
        self._session = session
        self._asked = asked
        self._by_id = by_id
        self._life: Life | None = None
        self._watched: list[Partition] = []
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False

    def start(self) -> None:
        if not self._try(is_last=self._request.max_wait_ms <= 0):
            wait_ms = min(self._request.max_wait_ms, MAX_WAIT_MS)
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self.hurry)
            self._slot.connection.park(self)

    def hurry(self) -> None:
        self._unwatch()
        self._try(is_last=True)

    def abandon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unwatch()

    def _wake(self) -> None:
        # Several partitions may have news in one turn of the loop: look once, after all of them.
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._woken = False
        if self._timer is not None and self._slot.is_open:
            self._unwatch()
            self._try(is_last=False)

    def _try(self, *, is_last: bool) -> bool:
        """Read; answer if that is enough or the last chance, otherwise watch for more."""
        life = self._fetcher.life
        assert life is not None
        reading = Reading(life, self._request, self._max_bytes(life), self._by_id)
        for asked in self._asked:
            reading.read(asked)
        if is_last or not self._asked or reading.is_urgent or reading.size >= self._request.min_bytes:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._slot.connection.park(None)
            self._answer(reading)
            return True
        self._life = life
        self._watched = reading.partitions
        for partition in self._watched:
            life.watch(partition, self._wake)
        return False

    def _max_bytes(self, life: Life) -> int:
        max_bytes = min(self._request.max_bytes, self._fetcher.max_bytes)
        quotas = life.broker.quotas
        limit = self._fetcher.meters.fetch_limit(quotas, self._slot) if quotas.by_entity else None
        return max_bytes if limit is None else min(max_bytes, limit)

    def _unwatch(self) -> None:
        if self._life is not None:
            for partition in self._watched:
                self._life.unwatch(partition, self._wake)
            self._life = None

    def _answer(self, reading: Reading) -> None:
        session = self._session
        quotas = reading.quotas
        if quotas.by_entity and not self._fetcher.meters.may_send(quotas, self._slot, reading.size):
            self._answer_nothing()
            return
        topics: dict[tuple[str, bytes], FetchableTopicResponse] = {}
        for asked, answer in reading.answers:
            if session is not None:
                is_news = asked.is_news(answer)
                asked.told(answer)
                if not is_news and self._request.session_epoch != INITIAL_EPOCH:
                    continue
                if answer.records:
                    session.served(asked)
            if isinstance(answer.records, Region):
                answer.records = answer.records.load()
            topic = topics.get(asked.topic)
            if topic is None:
                name, topic_id = asked.topic
                topic = topics[asked.topic] = FetchableTopicResponse(topic=name, topic_id=topic_id)
            topic.partitions.append(answer)
        session_id = NO_SESSION if session is None else session.session_id
        self._slot.answer(FetchResponse(session_id=session_id, responses=list(topics.values())))

    def _answer_nothing(self) -> None:
        """The client has used too much and must wait (KIP-219). What a session has told it stays as it was.

        A client does not take an answer without partitions for the beginning of a session, so there is none.
        """
        session = self._session
        session_id = NO_SESSION if session is None else session.session_id
        if session is not None and self._request.session_epoch == INITIAL_EPOCH:
            self._fetcher.sessions.close(session_id)
            session_id = NO_SESSION
        self._slot.answer(FetchResponse(session_id=session_id))


class Reading:
    """One pass over the partitions of a fetch, within its limits."""

    __slots__ = (
        "_broker",
        "_by_id",
        "_committed",
        "_life",
        "_room",
        "answers",
        "is_urgent",
        "partitions",
        "size",
    )

    @property
    def quotas(self) -> Quotas:
        return self._broker.quotas

    def __init__(self, life: Life, request: FetchRequest, max_bytes: int, by_id: bool) -> None:
        self._life = life
        self._broker: Broker = life.broker
        self._by_id = by_id
        self._committed = request.isolation_level == READ_COMMITTED
        self._room = max_bytes
        self.size = 0
        self.is_urgent = False
        """There is something that a client must not wait to hear."""
        self.partitions: list[Partition] = []
        self.answers: list[tuple[Asked, PartitionData]] = []

    def read(self, asked: Asked) -> None:
        answer = self._read(asked)
        if answer.error_code or answer.diverging_epoch is not None:
            self.is_urgent = True
        self.answers.append((asked, answer))

    def _read(self, asked: Asked) -> PartitionData:
        wanted = asked.wanted
        name, topic_id = asked.topic
        if self._by_id:
            partition = self._broker.catalog.partition_by_id(topic_id, wanted.partition)
            missing = ErrorCode.UNKNOWN_TOPIC_ID
            if partition is None and topic_id in self._broker.catalog.by_id:
                missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        else:
            partition = self._broker.catalog.partition(name, wanted.partition)
            missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if partition is None:
            return _refusal(wanted, missing)
        error = refuses_epoch(self._broker, wanted.current_leader_epoch)
        if error is not None:
            return _refusal(wanted, error)
        self.partitions.append(partition)
        return self._read_partition(partition, wanted)

    def _read_partition(self, partition: Partition, wanted: FetchPartition) -> PartitionData:
        log = partition.log
        answer = PartitionData(
            partition_index=wanted.partition,
            high_watermark=log.high_watermark,
            last_stable_offset=log.last_stable_offset,
            log_start_offset=log.shown_start_offset,
            records=b"",
        )
        diverging = _diverges(log, wanted)
        if diverging is not None:
            answer.diverging_epoch = diverging
            return answer
        offset = wanted.fetch_offset
        if not log.shown_start_offset <= offset <= log.high_watermark:
            answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            return answer
        end_offset = log.last_stable_offset if self._committed else log.high_watermark
        if self._committed:
            answer.aborted_transactions = []
        if offset < end_offset:
            self._read_records(partition, offset, end_offset, wanted, answer)
        return answer

    def _read_records(
        self,
        partition: Partition,
        offset: int,
        end_offset: int,
        wanted: FetchPartition,
        answer: PartitionData,
    ) -> None:
        # The first batch of a fetch is sent whole, whatever its size: or a consumer could never pass it.
        is_first = self.size == 0
        max_bytes = min(wanted.partition_max_bytes, self._room)
        if max_bytes <= 0 and not is_first:
            return
        view = self._life.store.partition(partition.topic.topic_id, partition.index)
        region = view.read(offset, max_bytes, end_offset, at_least_one=is_first)
        if region is None:
            return
        answer.records = region
        self.size += len(region)
        self._room -= len(region)
        if self._committed:
            answer.aborted_transactions = [
                AbortedTransaction(producer_id=aborted.producer_id, first_offset=aborted.first_offset)
                for aborted in view.aborted_in(offset, region.end_offset)
            ]


def _diverges(log: PartitionLog, wanted: FetchPartition) -> EpochEndOffset | None:
    """Where the client's log and ours part, if they do: it has read what we do not have (KIP-595)."""
    if wanted.last_fetched_epoch < 0:
        return None
    end = log.end_of_epoch(wanted.last_fetched_epoch)
    if end.epoch == wanted.last_fetched_epoch and end.start_offset >= wanted.fetch_offset:
        return None
    return EpochEndOffset(epoch=end.epoch, end_offset=end.start_offset)


def _refusal(wanted: FetchPartition, error: ErrorCode) -> PartitionData:
    return PartitionData(partition_index=wanted.partition, error_code=error, high_watermark=-1, records=b"")
