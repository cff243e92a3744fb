"""MySQL and MariaDB as a transactional sink."""

from semel.sinks.mysql.dialect import MySQLDialect
from semel.sinks.mysql.sink import MySQLSink

__all__ = ["MySQLDialect", "MySQLSink"]
