"""Transactional sinks: each epoch becomes visible exactly once, whole or not at all."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

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
from semel.sinks.settings import OnBadRow, SinkSettings

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
    "OnBadRow",
    "Origin",
    "PostgresSink",
    "Receipt",
    "SinkError",
    "SinkSettings",
    "UnknownOutcome",
    "WriteFailed",
]


# Each needs an extra of its own: it is imported when it is first asked for.
DEFINED_IN: Final = {
    "KafkaSink": "semel.sinks.kafka",
    "MySQLSink": "semel.sinks.mysql",
    "PostgresSink": "semel.sinks.postgres",
}


def __getattr__(name: str) -> object:
    if name not in DEFINED_IN:
        raise AttributeError(f"module 'semel.sinks' has no attribute {name!r}")
    found: object = getattr(import_module(DEFINED_IN[name]), name)
    return found
