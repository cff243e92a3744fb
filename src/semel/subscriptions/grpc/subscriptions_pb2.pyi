from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class Start(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START_UNSPECIFIED: _ClassVar[Start]
    START_EARLIEST: _ClassVar[Start]
    START_LATEST: _ClassVar[Start]

class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAUSE_UNSPECIFIED: _ClassVar[Cause]
    CAUSE_NACKED: _ClassVar[Cause]
    CAUSE_TIMED_OUT: _ClassVar[Cause]
    CAUSE_REJECTED: _ClassVar[Cause]
    CAUSE_LOST: _ClassVar[Cause]

class Problem(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBLEM_UNSPECIFIED: _ClassVar[Problem]
    PROBLEM_MALFORMED: _ClassVar[Problem]
    PROBLEM_UNKNOWN_DELIVERY: _ClassVar[Problem]
    PROBLEM_TOO_LATE: _ClassVar[Problem]
    PROBLEM_NO_TRANSACTION: _ClassVar[Problem]
    PROBLEM_REPEATED: _ClassVar[Problem]
    PROBLEM_NOT_ALLOWED: _ClassVar[Problem]
    PROBLEM_LOST: _ClassVar[Problem]
    PROBLEM_OTHER_SETTING: _ClassVar[Problem]

START_UNSPECIFIED: Start
START_EARLIEST: Start
START_LATEST: Start
CAUSE_UNSPECIFIED: Cause
CAUSE_NACKED: Cause
CAUSE_TIMED_OUT: Cause
CAUSE_REJECTED: Cause
CAUSE_LOST: Cause
PROBLEM_UNSPECIFIED: Problem
PROBLEM_MALFORMED: Problem
PROBLEM_UNKNOWN_DELIVERY: Problem
PROBLEM_TOO_LATE: Problem
PROBLEM_NO_TRANSACTION: Problem
PROBLEM_REPEATED: Problem
PROBLEM_NOT_ALLOWED: Problem
PROBLEM_LOST: Problem
PROBLEM_OTHER_SETTING: Problem

class SubscribeRequest(_message.Message):
    __slots__ = ("ack", "begin", "credits", "nack", "setup", "statement")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    setup: Setup
    credits: Credits
    begin: Begin
    statement: Statement
    ack: Ack
    nack: Nack
    def __init__(
        self,
        setup: Setup | _Mapping | None = ...,
        credits: Credits | _Mapping | None = ...,
        begin: Begin | _Mapping | None = ...,
        statement: Statement | _Mapping | None = ...,
        ack: Ack | _Mapping | None = ...,
        nack: Nack | _Mapping | None = ...,
    ) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("applied", "committed", "delivery", "in_doubt", "ready", "refused", "rolled_back", "warning")
    READY_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    delivery: Delivery
    applied: Applied
    refused: Refused
    committed: Committed
    rolled_back: RolledBack
    in_doubt: InDoubt
    warning: Warning
    def __init__(
        self,
        ready: Ready | _Mapping | None = ...,
        delivery: Delivery | _Mapping | None = ...,
        applied: Applied | _Mapping | None = ...,
        refused: Refused | _Mapping | None = ...,
        committed: Committed | _Mapping | None = ...,
        rolled_back: RolledBack | _Mapping | None = ...,
        in_doubt: InDoubt | _Mapping | None = ...,
        warning: Warning | _Mapping | None = ...,
    ) -> None: ...

class Setup(_message.Message):
    __slots__ = ("batch_size", "client_id", "credits", "group", "settings", "topics")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    credits: int
    batch_size: int
    client_id: str
    settings: Settings
    def __init__(
        self,
        group: str | None = ...,
        topics: _Iterable[str] | None = ...,
        credits: int | None = ...,
        batch_size: int | None = ...,
        client_id: str | None = ...,
        settings: Settings | _Mapping | None = ...,
    ) -> None: ...

class Settings(_message.Message):
    __slots__ = (
        "backoff_first_ms",
        "backoff_max_ms",
        "dead_letter_topic",
        "delivery_timeout_ms",
        "max_attempts",
        "max_in_flight",
        "max_wait_ms",
        "start",
    )
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    max_in_flight: int
    max_attempts: int
    delivery_timeout_ms: int
    backoff_first_ms: int
    backoff_max_ms: int
    dead_letter_topic: str
    start: Start
    max_wait_ms: int
    def __init__(
        self,
        max_in_flight: int | None = ...,
        max_attempts: int | None = ...,
        delivery_timeout_ms: int | None = ...,
        backoff_first_ms: int | None = ...,
        backoff_max_ms: int | None = ...,
        dead_letter_topic: str | None = ...,
        start: Start | str | None = ...,
        max_wait_ms: int | None = ...,
    ) -> None: ...

class Credits(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: int | None = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: int | None = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = (
        "delivery_id",
        "headers",
        "key",
        "partition",
        "statement_id",
        "timestamp_ms",
        "topic",
        "value",
    )
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    statement_id: int
    topic: str
    key: bytes
    value: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    partition: int
    timestamp_ms: int
    def __init__(
        self,
        delivery_id: int | None = ...,
        statement_id: int | None = ...,
        topic: str | None = ...,
        key: bytes | None = ...,
        value: bytes | None = ...,
        headers: _Iterable[Header | _Mapping] | None = ...,
        partition: int | None = ...,
        timestamp_ms: int | None = ...,
    ) -> None: ...

class Ack(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: int | None = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("delay_ms", "delivery_id", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    reason: str
    delay_ms: int
    def __init__(
        self, delivery_id: int | None = ..., reason: str | None = ..., delay_ms: int | None = ...
    ) -> None: ...

class Ready(_message.Message):
    __slots__ = ("max_credits", "max_statements", "settings", "version")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CREDITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    settings: Settings
    max_statements: int
    max_credits: int
    version: str
    def __init__(
        self,
        settings: Settings | _Mapping | None = ...,
        max_statements: int | None = ...,
        max_credits: int | None = ...,
        version: str | None = ...,
    ) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("attempt", "delivery_id", "partition", "records", "topic")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    topic: str
    partition: int
    attempt: int
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(
        self,
        delivery_id: int | None = ...,
        topic: str | None = ...,
        partition: int | None = ...,
        attempt: int | None = ...,
        records: _Iterable[Record | _Mapping] | None = ...,
    ) -> None: ...

class Record(_message.Message):
    __slots__ = ("headers", "key", "offset", "timestamp_ms", "value")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    key: bytes
    value: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    timestamp_ms: int
    def __init__(
        self,
        offset: int | None = ...,
        key: bytes | None = ...,
        value: bytes | None = ...,
        headers: _Iterable[Header | _Mapping] | None = ...,
        timestamp_ms: int | None = ...,
    ) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: str | None = ..., value: bytes | None = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("delivery_id", "offset", "partition", "statement_id")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    statement_id: int
    partition: int
    offset: int
    def __init__(
        self,
        delivery_id: int | None = ...,
        statement_id: int | None = ...,
        partition: int | None = ...,
        offset: int | None = ...,
    ) -> None: ...

class Refused(_message.Message):
    __slots__ = ("delivery_id", "problem", "reason", "rejects_transaction", "statement_id")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REJECTS_TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    statement_id: int
    problem: Problem
    reason: str
    rejects_transaction: bool
    def __init__(
        self,
        delivery_id: int | None = ...,
        statement_id: int | None = ...,
        problem: Problem | str | None = ...,
        reason: str | None = ...,
        rejects_transaction: bool | None = ...,
    ) -> None: ...

class Committed(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: int | None = ...) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("cause", "delivery_id", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    cause: Cause
    reason: str
    def __init__(
        self, delivery_id: int | None = ..., cause: Cause | str | None = ..., reason: str | None = ...
    ) -> None: ...

class InDoubt(_message.Message):
    __slots__ = ("delivery_id", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    reason: str
    def __init__(self, delivery_id: int | None = ..., reason: str | None = ...) -> None: ...

class Warning(_message.Message):
    __slots__ = ("delivery_id", "problem", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    problem: Problem
    reason: str
    def __init__(
        self, delivery_id: int | None = ..., problem: Problem | str | None = ..., reason: str | None = ...
    ) -> None: ...
