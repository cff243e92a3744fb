"""Which error a client of which version is given: codes that a version does not know would be fatal to it."""

from __future__ import annotations

from typing import Final

from semel.broker.counters import Counters
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode

_PRODUCER_FENCED_SINCE: Final[dict[int, int]] = {
    ApiKey.INIT_PRODUCER_ID: 4,
    ApiKey.ADD_PARTITIONS_TO_TXN: 2,
    ApiKey.ADD_OFFSETS_TO_TXN: 2,
    ApiKey.END_TXN: 2,
}
_ABORTABLE_SINCE: Final[dict[int, int]] = {
    ApiKey.PRODUCE: 11,
    ApiKey.INIT_PRODUCER_ID: 5,
    ApiKey.ADD_PARTITIONS_TO_TXN: 5,
    ApiKey.ADD_OFFSETS_TO_TXN: 4,
    ApiKey.END_TXN: 4,
    ApiKey.TXN_OFFSET_COMMIT: 4,
}


def fenced(counters: Counters, api: ApiKey, version: int) -> ErrorCode:
    """Another instance has taken over."""
    counters.fenced += 1
    since = _PRODUCER_FENCED_SINCE.get(api)
    if since is not None and version >= since:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.INVALID_PRODUCER_EPOCH


def ask_again(counters: Counters, api: ApiKey) -> ErrorCode:
    """It came by a connection that its client may have left (`hearing.py`)."""
    counters.asked_again += 1
    if api is ApiKey.TXN_OFFSET_COMMIT:
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # Its clients do not know the other.
    return ErrorCode.CONCURRENT_TRANSACTIONS


def abortable(api: ApiKey, version: int) -> ErrorCode:
    """The transaction is spoiled: abort it and begin another."""
    return (
        ErrorCode.TRANSACTION_ABORTABLE if version >= _ABORTABLE_SINCE[api] else ErrorCode.INVALID_TXN_STATE
    )
