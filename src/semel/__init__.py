"""Semel: exactly-once for stream pipelines."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from semel.version import __version__

if TYPE_CHECKING:
    from semel import sinks, spark, subscriptions
    from semel.embedded import Broker
    from semel.sinks.atomic import transaction
    from semel.subscriptions import subscribe
    from semel.subscriptions.stages import stage

__all__ = [
    "Broker",
    "__version__",
    "sinks",
    "spark",
    "stage",
    "subscribe",
    "subscriptions",
    "transaction",
]

# Each part is imported when it is first asked for: a client process need not load the broker, and a part
# whose extra is not installed is missed only where it is used.
PARTS: Final = ("sinks", "spark", "subscriptions")
DEFINED_IN: Final = {
    "Broker": "semel.embedded",
    "stage": "semel.subscriptions.stages",
    "subscribe": "semel.subscriptions",
    "transaction": "semel.sinks.atomic",
}


def __getattr__(name: str) -> object:
    if name in PARTS:
        return import_module(f"semel.{name}")
    if name in DEFINED_IN:
        found: object = getattr(import_module(DEFINED_IN[name]), name)
        return found
    raise AttributeError(f"module 'semel' has no attribute {name!r}")
