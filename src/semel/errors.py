"""What can go wrong, sorted by what the caller may do about it.

Every message says what happened, why, and what to do next.
"""


def how_to_install(extra: str) -> str:
    """What to do where the packages of an extra are missing. Semel itself comes as a checkout."""
    return f"pip install '.[{extra}]' in a checkout of Semel"


def missing_extra(what: str, extra: str, error: ImportError) -> ImportError:
    """What to raise in place of an import that failed for want of an extra: the same, but it says so."""
    reason = str(error) if error.name is None else f"No module named {error.name!r}"
    return ModuleNotFoundError(
        f"{what} needs a package that is missing ({reason}): {how_to_install(extra)}", name=error.name
    )


class SemelError(Exception):
    """The root of everything that Semel raises on purpose."""


class ConfigError(SemelError):
    """A setting or an argument is wrong: the user can fix it before start."""


class NotFoundError(ConfigError):
    """What was named does not exist."""


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
