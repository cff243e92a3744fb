"""PostgreSQL as a transactional sink."""

from semel.errors import missing_extra

try:
    from semel.sinks.postgres.dialect import PostgresDialect
    from semel.sinks.postgres.sink import PostgresSink
except ImportError as error:
    raise missing_extra("PostgresSink", "postgres", error) from error

__all__ = ["PostgresDialect", "PostgresSink"]
