"""Semel: exactly-once for stream pipelines."""

from typing import TYPE_CHECKING

from semel.version import __version__

if TYPE_CHECKING:
    from semel.embedded import Broker

__all__ = ["Broker", "__version__"]


def __getattr__(name: str) -> object:
    # The broker is imported when it is first asked for: a client process need not load it.
    if name == "Broker":
        from semel.embedded import Broker

        return Broker
    raise AttributeError(f"module 'semel' has no attribute {name!r}")
