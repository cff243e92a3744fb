"""PostgreSQL as a transactional sink."""

from semel.sinks.postgres.dialect import PostgresDialect
from semel.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresDialect", "PostgresSink"]
