"""What can go wrong, sorted by what the caller may do about it.

Every message says what happened, why, and what to do next.
"""


def how_to_install(extra: str) -> str:
    """What to do where the packages of an extra are missing. Semel itself comes as a checkout."""
    return f"pip install '.[{extra}]' in a checkout of Semel"


class SemelError(Exception):
    """The root of everything that Semel raises on purpose."""


class ConfigError(SemelError):
    """A setting or an argument is wrong: the user can fix it before start."""


class ProtocolError(SemelError):
    """The peer broke the protocol: answer if possible, then close the connection."""


class StorageError(SemelError):
    """The disk failed: stop taking writes and recover."""


class CorruptionError(StorageError):
    """Bytes that were durable have changed: refuse to start, and say where."""


class BrokerError(SemelError):
    """A broker answered with an error code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class RetriableError(BrokerError):
    """The same request may succeed later."""


class AbortableError(BrokerError):
    """The transaction is spoiled; abort it and begin another."""


class FencedError(BrokerError):
    """Another instance has taken over; this one must stop."""


class FatalError(BrokerError):
    """Nothing that this client can do will help."""
