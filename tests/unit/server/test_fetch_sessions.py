"""Claims about fetch sessions: who is remembered, for how long, and what counts as news."""

from itertools import count

from semel.server.fetch_sessions import EVICTION_AGE_MS, Asked, FetchSession, FetchSessions
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
)


def fetch(session_id: int, epoch: int, *partitions: int, forget: tuple[int, ...] = ()) -> FetchRequest:
    topics = [FetchTopic(topic="t", partitions=[FetchPartition(partition=index) for index in partitions])]
    forgotten = [ForgottenTopic(topic="t", partitions=list(forget))] if forget else []
    return FetchRequest(
        session_id=session_id,
        session_epoch=epoch,
        topics=topics if partitions else [],
        forgotten_topics_data=forgotten,
    )


def sessions(slots: int = 10) -> FetchSessions:
    ids = count(1)
    return FetchSessions(slots, lambda: next(ids))


def opened(cache: FetchSessions, *partitions: int, now_ms: int = 0) -> FetchSession:
    session = cache.open(fetch(0, 0, *partitions), False, now_ms)
    assert session is not None
    return session


def indexes(session: FetchSession) -> list[int]:
    return [asked.wanted.partition for asked in session.partitions.values()]


def test_a_session_remembers_adds_and_forgets_partitions() -> None:
    cache = sessions()
    session = opened(cache, 0, 1)
    again = cache.go_on(fetch(session.session_id, 1, 2, forget=(0,)), False, 0)
    assert again is session
    assert indexes(session) == [1, 2]


def test_a_lost_answer_is_noticed_by_the_epoch() -> None:
    cache = sessions()
    session = opened(cache, 0)
    assert cache.go_on(fetch(session.session_id, 1), False, 0) is session
    assert cache.go_on(fetch(session.session_id, 1), False, 0) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.go_on(fetch(session.session_id, 2), False, 0) is session


def test_an_unknown_session_and_a_change_from_names_to_ids_are_refused() -> None:
    cache = sessions()
    session = opened(cache, 0)
    assert cache.go_on(fetch(99, 1), False, 0) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.go_on(fetch(session.session_id, 1), True, 0) is ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR


def test_a_full_cache_gives_no_session_until_the_oldest_is_stale() -> None:
    cache = sessions(slots=2)
    first, second = opened(cache, 0), opened(cache, 0)
    assert cache.open(fetch(0, 0, 0), False, EVICTION_AGE_MS - 1) is None
    cache.go_on(fetch(first.session_id, 1), False, EVICTION_AGE_MS - 1)
    third = cache.open(fetch(0, 0, 0), False, EVICTION_AGE_MS)
    assert third is not None
    assert cache.go_on(fetch(second.session_id, 1), False, 0) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.go_on(fetch(first.session_id, 2), False, 0) is first


def test_opening_anew_closes_the_session_before() -> None:
    cache = sessions()
    session = opened(cache, 0)
    cache.open(fetch(session.session_id, 0, 1), False, 0)
    assert len(cache) == 1


def test_only_what_changed_is_news() -> None:
    asked = Asked(("t", bytes(16)), FetchPartition(partition=0))
    answer = PartitionData(high_watermark=5, last_stable_offset=5, log_start_offset=0, records=b"")
    assert asked.is_news(answer)
    asked.told(answer)
    assert not asked.is_news(answer)
    for change in ({"high_watermark": 6}, {"last_stable_offset": 4}, {"log_start_offset": 1}):
        other = PartitionData(high_watermark=5, last_stable_offset=5, log_start_offset=0, records=b"")
        for name, value in change.items():
            setattr(other, name, value)
        assert asked.is_news(other)


def test_an_error_is_told_again_and_its_end_is_news() -> None:
    asked = Asked(("t", bytes(16)), FetchPartition(partition=0))
    good = PartitionData(high_watermark=5, last_stable_offset=5, log_start_offset=0, records=b"")
    bad = PartitionData(error_code=3, high_watermark=-1, records=b"")
    asked.told(good)
    assert asked.is_news(bad)
    asked.told(bad)
    assert asked.is_news(bad)
    assert asked.is_news(good)


def test_a_partition_that_was_served_goes_to_the_end_of_the_line() -> None:
    session = opened(sessions(), 0, 1, 2)
    session.served(next(iter(session.partitions.values())))
    assert indexes(session) == [1, 2, 0]
