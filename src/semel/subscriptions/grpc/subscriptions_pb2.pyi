from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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
    __slots__ = ("setup", "credits", "begin", "statement", "ack", "nack")
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
    def __init__(self, setup: _Optional[_Union[Setup, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., statement: _Optional[_Union[Statement, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("ready", "delivery", "applied", "refused", "committed", "rolled_back", "in_doubt", "warning")
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
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., rolled_back: _Optional[_Union[RolledBack, _Mapping]] = ..., in_doubt: _Optional[_Union[InDoubt, _Mapping]] = ..., warning: _Optional[_Union[Warning, _Mapping]] = ...) -> None: ...

class Setup(_message.Message):
    __slots__ = ("group", "topics", "credits", "batch_size", "client_id", "settings")
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
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., credits: _Optional[int] = ..., batch_size: _Optional[int] = ..., client_id: _Optional[str] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("max_in_flight", "max_attempts", "delivery_timeout_ms", "backoff_first_ms", "backoff_max_ms", "dead_letter_topic", "start", "max_wait_ms")
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
    def __init__(self, max_in_flight: _Optional[int] = ..., max_attempts: _Optional[int] = ..., delivery_timeout_ms: _Optional[int] = ..., backoff_first_ms: _Optional[int] = ..., backoff_max_ms: _Optional[int] = ..., dead_letter_topic: _Optional[str] = ..., start: _Optional[_Union[Start, str]] = ..., max_wait_ms: _Optional[int] = ...) -> None: ...

class Credits(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: _Optional[int] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("delivery_id", "statement_id", "topic", "key", "value", "headers", "partition", "timestamp_ms")
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
    def __init__(self, delivery_id: _Optional[int] = ..., statement_id: _Optional[int] = ..., topic: _Optional[str] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., partition: _Optional[int] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("delivery_id", "reason", "delay_ms")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    reason: str
    delay_ms: int
    def __init__(self, delivery_id: _Optional[int] = ..., reason: _Optional[str] = ..., delay_ms: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("settings", "max_statements", "max_credits", "version")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CREDITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    settings: Settings
    max_statements: int
    max_credits: int
    version: str
    def __init__(self, settings: _Optional[_Union[Settings, _Mapping]] = ..., max_statements: _Optional[int] = ..., max_credits: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("delivery_id", "topic", "partition", "attempt", "records")
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
    def __init__(self, delivery_id: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., attempt: _Optional[int] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("offset", "key", "value", "headers", "timestamp_ms")
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
    def __init__(self, offset: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("delivery_id", "statement_id", "partition", "offset")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    statement_id: int
    partition: int
    offset: int
    def __init__(self, delivery_id: _Optional[int] = ..., statement_id: _Optional[int] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("delivery_id", "statement_id", "problem", "reason", "rejects_transaction")
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
    def __init__(self, delivery_id: _Optional[int] = ..., statement_id: _Optional[int] = ..., problem: _Optional[_Union[Problem, str]] = ..., reason: _Optional[str] = ..., rejects_transaction: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("delivery_id",)
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    def __init__(self, delivery_id: _Optional[int] = ...) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("delivery_id", "cause", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    cause: Cause
    reason: str
    def __init__(self, delivery_id: _Optional[int] = ..., cause: _Optional[_Union[Cause, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class InDoubt(_message.Message):
    __slots__ = ("delivery_id", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    reason: str
    def __init__(self, delivery_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Warning(_message.Message):
    __slots__ = ("delivery_id", "problem", "reason")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    delivery_id: int
    problem: Problem
    reason: str
    def __init__(self, delivery_id: _Optional[int] = ..., problem: _Optional[_Union[Problem, str]] = ..., reason: _Optional[str] = ...) -> None: ...
