"""A topic and a database in one atomic step: publish records and change rows, both or neither."""

from semel.errors import missing_extra

try:
    from semel.sinks.atomic.atomic import Atomic, AtomicTransaction, transaction
    from semel.sinks.atomic.blocking import BlockingAtomic, BlockingTransaction
    from semel.sinks.atomic.settings import AtomicSettings
except ImportError as error:
    raise missing_extra("semel.transaction", "postgres", error) from error

__all__ = [
    "Atomic",
    "AtomicSettings",
    "AtomicTransaction",
    "BlockingAtomic",
    "BlockingTransaction",
    "transaction",
]
