"""MySQL and MariaDB as a transactional sink."""

from semel.errors import missing_extra

try:
    from semel.sinks.mysql.dialect import MySQLDialect
    from semel.sinks.mysql.sink import MySQLSink
except ImportError as error:
    raise missing_extra("MySQLSink", "mysql", error) from error

__all__ = ["MySQLDialect", "MySQLSink"]
