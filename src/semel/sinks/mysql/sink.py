"""A table of MySQL or MariaDB as a transactional sink."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.errors import ConfigError
from semel.sinks.errors import InitFailed
from semel.sinks.marker import Marker, Owner
from semel.sinks.mysql.dialect import DEFAULT_IDLE_TIMEOUT_S, MySQLDialect
from semel.sinks.mysql.session import DEFAULT_PORT, Address
from semel.sinks.mysql.text_rows import TuplesForm
from semel.sinks.settings import SinkSettings
from semel.sinks.sql.columns import Layout
from semel.sinks.sql.dialect import SqlSession
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import make_strategy, make_target

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

SCHEMES: Final = frozenset({"mysql", "mariadb"})
URL_OPTIONS: Final = frozenset({"ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password"})
URL_FLAGS: Final = frozenset({"ssl_disabled", "ssl_verify_cert", "ssl_verify_identity"})


class MySQLSink(SqlSink):
    """Epochs of rows into an InnoDB table of MySQL 8 or MariaDB 10.5, or later; tested with MariaDB 10.11.

    `url` is `mysql://user:password@host:3306/database`, with `?unix_socket=`, `ssl_ca=`,
    `ssl_verify_identity=true` and the like. `table` is `orders` or `sales.orders`, a database and its table.
    The rest is as for PostgresSink. `bulk` is whether array binding may be used, where the server has it
    (MariaDB), and `local_infile` whether LOAD DATA may, where the server allows it. Otherwise rows are sent
    by multi-row INSERT.
    """

    _dialect: MySQLDialect

    def __init__(
        self,
        url: str,
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
        local_infile: bool = True,
        bulk: bool = True,
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
        dialect = MySQLDialect(parse_url(url), idle_timeout, local_infile, bulk)
        super().__init__(dialect, target, make_strategy(strategy), settings)

    async def _open(self, owner: Owner) -> Marker:
        marker = await super()._open(owner)
        if self._writes_literals():
            log.warning(
                "sink %s: the server (or this sink's settings) does not allow LOAD DATA LOCAL: rows are sent "
                "by multi-row INSERT, which is slower. SET GLOBAL local_infile = 1 allows it",
                self.sink_id,
            )
        return marker

    def _writes_literals(self) -> bool:
        session = self._connection.session
        assert session is not None and self._layout is not None
        return isinstance(session.form(self._layout.table, self._layout.staged, None), TuplesForm)

    async def _check_target(self, session: SqlSession) -> Layout:
        layout = await super()._check_target(session)
        if layout.upserts:
            await self._refuse_other_keys(session, layout)
        return layout

    async def _refuse_other_keys(self, session: SqlSession, layout: Layout) -> None:
        """ON DUPLICATE KEY UPDATE replaces the row of any key that is met, and does not say which it was."""
        others = await self._dialect.other_keys(session, layout)
        if others:
            raise InitFailed(
                f"table {layout.table} has another unique key, ({others[0]}): a row that meets it would "
                f"replace a row of another ({', '.join(layout.keys)}). Use append, or drop that key"
            )


def parse_url(url: str) -> Address:
    """Where a URL leads. Whatever is not understood is an error, never ignored."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError("a MySQL sink needs a URL such as mysql://user:password@host:3306/database")
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise ConfigError("the URL of a MySQL sink names one database: mysql://user@host/database")
    unix_socket: str | None = None
    options: list[tuple[str, str | bool]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)):
        if name == "unix_socket":
            unix_socket = value
        elif name in URL_OPTIONS:
            options.append((name, value))
        elif name in URL_FLAGS and value in ("true", "false"):
            options.append((name, value == "true"))
        else:
            known = ", ".join(sorted({"unix_socket", *URL_OPTIONS, *URL_FLAGS}))
            raise ConfigError(
                f"{name}={value} in a MySQL URL is not known; there are {known} (flags: true or false)"
            )
    return Address(
        database,
        parts.hostname or "localhost",
        parts.port or DEFAULT_PORT,
        unix_socket,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        tuple(options),
    )
