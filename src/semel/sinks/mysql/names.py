"""Identifiers, as MySQL quotes them."""

from semel.sinks.sql.names import TableName


def quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def quote_table(table: TableName) -> str:
    return quote(table.name) if table.schema is None else f"{quote(table.schema)}.{quote(table.name)}"
