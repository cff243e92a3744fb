"""Kafka's error codes as the exceptions of `semel.errors`.

The class of an exception says what the caller may do (try again, abort, give up); its message says what was
asked for, what the broker answered and, where there is something to do about it, what to do next.
"""

from typing import Final

from semel.errors import AbortableError, BrokerError, FatalError, FencedError, RetriableError, SemelError
from semel.wire.errors import ErrorCode, error_name, retriable

FENCED: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.FENCED_INSTANCE_ID,
    }
)
ABORTABLE: Final = frozenset({ErrorCode.TRANSACTION_ABORTABLE})
# What no abort mends: whoever meets one of these inside a transaction has lost its transactional id, or may
# not use it.
ENDS_PRODUCER: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)

FENCED_HINT: Final = "another instance took over, or the transaction timed out: stop this one"

# What a user can do about an answer; codes whose name says it all are left out.
HINTS: Final[dict[int, str]] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "check the name with `semel topic list`",
    ErrorCode.TOPIC_ALREADY_EXISTS: "choose another name, or delete that topic first",
    ErrorCode.INVALID_TOPIC_EXCEPTION: "names are 1 to 249 letters, digits, '.', '_' or '-'",
    ErrorCode.MESSAGE_TOO_LARGE: "send smaller batches, or raise the topic's max.message.bytes",
    ErrorCode.RECORD_LIST_TOO_LARGE: "send smaller batches, or raise the topic's segment.bytes",
    ErrorCode.OFFSET_OUT_OF_RANGE: "start from an offset that the log still has, or from beginning or end",
    ErrorCode.NOT_ENOUGH_REPLICAS: "bring back the brokers that hold its replicas",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "ask for an ACL on that topic",
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "ask for an ACL on the cluster",
    ErrorCode.INVALID_REPLICATION_FACTOR: "it may not exceed the number of brokers",
    ErrorCode.UNSUPPORTED_VERSION: "the broker is too old for this request",
    ErrorCode.PRODUCER_FENCED: FENCED_HINT,
    ErrorCode.INVALID_PRODUCER_EPOCH: FENCED_HINT,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING: "the transactional id has expired, or has another producer",
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: "the broker's transaction.max.timeout.ms is the most it allows",
    ErrorCode.TRANSACTION_ABORTABLE: "abort the transaction and begin another",
    ErrorCode.INVALID_TXN_STATE: "it timed out, was ended otherwise, or has nothing in it",
    ErrorCode.ILLEGAL_GENERATION: "the consumer group has rebalanced; abort, and read what is assigned now",
    ErrorCode.UNKNOWN_MEMBER_ID: "the consumer has left its group; abort, and join again",
    ErrorCode.OFFSET_METADATA_TOO_LARGE: "the broker's offset.metadata.max.bytes is the most it allows",
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "ask for an ACL on that transactional id",
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "ask for an ACL on that group",
    ErrorCode.TRANSACTIONAL_ID_NOT_FOUND: "look for it with `semel txn list`",
}


class UnreachableError(RetriableError):
    """No answer came: the connection was refused, lost, or silent for too long."""

    def __init__(self, message: str, code: int = ErrorCode.NETWORK_EXCEPTION) -> None:
        super().__init__(message, code)


class UnsupportedRequestError(FatalError):
    """Client and broker have no version of an API in common."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNSUPPORTED_VERSION)


class UnknownOutcomeError(RetriableError):
    """A commit was sent and no answer says what became of it. Only the same commit, sent again, may ask."""


class TransactionStateError(SemelError):
    """A call that has no place in the transaction's present state, such as a send before begin."""


def broker_error(code: int, what: str, reason: str | None = None) -> BrokerError:
    """The exception for a code: `what` failed, perhaps with the broker's own `reason`."""
    message = f"{what}: {error_name(code)}"
    if reason:
        message += f", {reason.rstrip('.')}"
    if (hint := HINTS.get(code)) is not None:
        message += f"; {hint}"
    if code in FENCED:
        return FencedError(message, code)
    if code in ABORTABLE:
        return AbortableError(message, code)
    if retriable(code):
        return RetriableError(message, code)
    return FatalError(message, code)


def check(code: int, what: str, reason: str | None = None) -> None:
    """Raises unless the code says success."""
    if code != ErrorCode.NONE:
        raise broker_error(code, what, reason)


def spoiling(error: SemelError) -> SemelError:
    """What an error means for the transaction it happened in: an end of the producer, or a reason to abort.

    What could be retried has been; whoever still sees it can only abort.
    """
    if not isinstance(error, BrokerError) or isinstance(error, AbortableError):
        return error
    if error.code in ENDS_PRODUCER:
        return error
    return AbortableError(f"the transaction must be aborted: {error}", error.code)
