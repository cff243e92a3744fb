"""Fetch sessions (KIP-227): what a consumer asks for again and again, remembered between its fetches.

A session holds the partitions that a consumer reads, and what it was last told about each. A later fetch
names only what has changed, and is answered only with what is new. The consumer counts its fetches (the
epoch), so that a lost answer is noticed by either side and the session is begun anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import FetchPartition, FetchRequest, PartitionData

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
EVICTION_AGE_MS: Final = 120_000
_MAX_EPOCH: Final = 2**31 - 1

TopicKey = tuple[str, bytes]
"""A topic as the request names it: by name, or by id since version 13."""


class Asked:
    """A partition as a consumer asks for it, and what it was last told."""

    __slots__ = ("high_watermark", "last_stable_offset", "log_start_offset", "topic", "wanted")

    def __init__(self, topic: TopicKey, wanted: FetchPartition) -> None:
        self.topic = topic
        self.wanted = wanted
        self.high_watermark = -1
        self.last_stable_offset = -1
        self.log_start_offset = -1

    def is_news(self, answer: PartitionData) -> bool:
        """Whether the consumer has not been told this before."""
        return (
            answer.error_code != 0
            or bool(answer.records)
            or answer.diverging_epoch is not None
            or answer.high_watermark != self.high_watermark
            or answer.last_stable_offset != self.last_stable_offset
            or answer.log_start_offset != self.log_start_offset
        )

    def told(self, answer: PartitionData) -> None:
        if answer.error_code:
            self.high_watermark = -1  # An error is repeated until it is gone, and its end is news.
            return
        self.high_watermark = answer.high_watermark
        self.last_stable_offset = answer.last_stable_offset
        self.log_start_offset = answer.log_start_offset


class FetchSession:
    """One consumer's standing order."""

    __slots__ = ("by_id", "epoch", "partitions", "session_id", "used_ms")

    def __init__(self, session_id: int, by_id: bool, now_ms: int) -> None:
        self.session_id = session_id
        self.by_id = by_id
        self.epoch = 1
        self.used_ms = now_ms
        self.partitions: OrderedDict[tuple[TopicKey, int], Asked] = OrderedDict()

    def update(self, request: FetchRequest) -> None:
        for asked in asked_for(request):
            key = (asked.topic, asked.wanted.partition)
            known = self.partitions.get(key)
            if known is None:
                self.partitions[key] = asked
            else:
                known.wanted = asked.wanted
        for topic in request.forgotten_topics_data:
            for index in topic.partitions:
                self.partitions.pop(((topic.topic, topic.topic_id), index), None)

    def served(self, asked: Asked) -> None:
        """A partition that had data goes to the end of the line: the size limit must not starve others."""
        self.partitions.move_to_end((asked.topic, asked.wanted.partition))

    def advance(self, now_ms: int) -> None:
        self.epoch = 1 if self.epoch == _MAX_EPOCH else self.epoch + 1
        self.used_ms = now_ms


def asked_for(request: FetchRequest) -> list[Asked]:
    return [
        Asked((topic.topic, topic.topic_id), partition)
        for topic in request.topics
        for partition in topic.partitions
    ]


class FetchSessions:
    """All sessions, least recently used first."""

    def __init__(self, slots: int, new_session_id: Callable[[], int]) -> None:
        self._slots = slots
        self._new_session_id = new_session_id
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: FetchRequest, by_id: bool, now_ms: int) -> FetchSession | None:
        """A new session, or None if there is no slot for one."""
        if request.session_id != NO_SESSION:
            self.close(request.session_id)
        if not request.topics or not self._make_room(now_ms):
            return None
        session_id = self._new_session_id()
        while session_id in self._sessions or session_id == NO_SESSION:
            session_id = self._new_session_id()
        session = self._sessions[session_id] = FetchSession(session_id, by_id, now_ms)
        session.update(request)
        return session

    def go_on(self, request: FetchRequest, by_id: bool, now_ms: int) -> FetchSession | ErrorCode:
        """The session that an incremental fetch belongs to, brought up to date, or why not."""
        session = self._sessions.get(request.session_id)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != request.session_epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if session.by_id != by_id:
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        self._sessions.move_to_end(request.session_id)
        session.update(request)
        session.advance(now_ms)
        return session

    def close(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)

    def _make_room(self, now_ms: int) -> bool:
        if len(self._sessions) < self._slots:
            return True
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or now_ms - oldest.used_ms < EVICTION_AGE_MS:
            return False
        self.close(oldest.session_id)
        return True
