"""A PostgreSQL table as a transactional sink."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from semel.sinks.postgres.dialect import DEFAULT_IDLE_TIMEOUT_S, PostgresDialect
from semel.sinks.settings import SinkSettings
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import make_strategy, make_target

if TYPE_CHECKING:
    import pyarrow as pa


class PostgresSink(SqlSink):
    """Epochs of rows into a table of PostgreSQL 13 or later.

    `table` is `orders`, `sales.orders` or `"my.schema"."my.table"`, as it is written. `mode` is append,
    upsert (by `keys`; with `change_column` also deletions) or delete; `order_by` says which of two rows of
    one key is the last. `columns` maps the rows' columns to the table's. `schema` is the rows' Arrow schema:
    types are then checked at open, and `create_table` may make the table. `strategy` is direct (rows go into
    the epoch's transaction through its owner) or staged (into a staging table first; the default for dead
    letters). `idle_timeout` is how long, in seconds, an epoch of strategy direct may pause.
    """

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        mode: str = "append",
        keys: Sequence[str] = (),
        order_by: str | Sequence[str] | None = None,
        change_column: str | None = None,
        strategy: str | None = None,
        columns: Mapping[str, str] | None = None,
        schema: "pa.Schema | None" = None,
        create_table: bool = False,
        idle_timeout: float = DEFAULT_IDLE_TIMEOUT_S,
        settings: SinkSettings | None = None,
    ) -> None:
        target = make_target(
            table,
            mode=mode,
            keys=keys,
            order_by=order_by,
            change_column=change_column,
            columns=columns,
            schema=schema,
            create_table=create_table,
        )
        super().__init__(PostgresDialect(dsn, idle_timeout), target, make_strategy(strategy), settings)
