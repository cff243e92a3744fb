"""Transactional sinks: each epoch becomes visible exactly once, whole or not at all."""

from typing import TYPE_CHECKING

from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    ConnectionLost,
    FencedOut,
    InitFailed,
    MarkerMismatch,
    SinkError,
    UnknownOutcome,
    WriteFailed,
)
from semel.sinks.receipts import Origin, Receipt
from semel.sinks.settings import SinkSettings

if TYPE_CHECKING:
    from semel.sinks.kafka import KafkaSink
    from semel.sinks.mysql import MySQLSink
    from semel.sinks.postgres import PostgresSink

__all__ = [
    "AbortFailed",
    "BeginFailed",
    "CommitFailed",
    "ConnectionLost",
    "FencedOut",
    "InitFailed",
    "KafkaSink",
    "MarkerMismatch",
    "MySQLSink",
    "Origin",
    "PostgresSink",
    "Receipt",
    "SinkError",
    "SinkSettings",
    "UnknownOutcome",
    "WriteFailed",
]


def __getattr__(name: str) -> object:
    # Each sink needs an extra of its own: it is imported when it is first asked for.
    if name == "KafkaSink":
        from semel.sinks.kafka import KafkaSink

        return KafkaSink
    if name == "PostgresSink":
        from semel.sinks.postgres import PostgresSink

        return PostgresSink
    if name == "MySQLSink":
        from semel.sinks.mysql import MySQLSink

        return MySQLSink
    raise AttributeError(f"module 'semel.sinks' has no attribute {name!r}")
