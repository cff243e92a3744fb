"""What a SQL sink writes to and how: checked when the sink is made, before anything is connected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semel.errors import ConfigError
from semel.sinks.sql.names import TableName, parse_table_name

if TYPE_CHECKING:
    import pyarrow as pa


class Mode(Enum):
    """What a row does to the table."""

    APPEND = "append"  # it is inserted
    UPSERT = "upsert"  # it replaces the row of its key; with a change column, or deletes it
    DELETE = "delete"  # it deletes the row of its key; with a change column this is the same as upsert


class Strategy(Enum):
    """How an epoch's rows come into its one SQL transaction."""

    DIRECT = "direct"  # writers bring them to the owner, whose connection loads them
    STAGED = "staged"  # writers load them into a staging table, from which the owner moves them


@dataclass(slots=True, frozen=True)
class Target:
    """A table, and what rows do to it.

    `columns` maps the rows' columns to the table's; None takes equal names. `schema` is the rows' Arrow
    schema: with it types are checked at open, and `create_table` makes a table that is not there.
    """

    table: TableName
    mode: Mode
    keys: tuple[str, ...]
    order_by: tuple[str, ...]
    change_column: str | None
    columns: Mapping[str, str] | None
    schema: "pa.Schema | None"
    create_table: bool

    @property
    def merges(self) -> bool:
        """Whether rows meet rows that are there already, by key."""
        return self.mode is not Mode.APPEND


def make_target(
    table: str,
    *,
    mode: str,
    keys: Sequence[str],
    order_by: str | Sequence[str] | None,
    change_column: str | None,
    columns: Mapping[str, str] | None,
    schema: "pa.Schema | None",
    create_table: bool,
) -> Target:
    """The target, or a ConfigError that says what does not go together. Keys are columns of the rows."""
    order = (order_by,) if isinstance(order_by, str) else tuple(order_by or ())
    key_columns = (keys,) if isinstance(keys, str) else tuple(keys)
    made = Target(
        parse_table_name(table), _mode(mode), key_columns, order, change_column, columns, schema, create_table
    )
    if made.merges and not made.keys:
        raise ConfigError(f"mode {mode!r} needs keys: the columns that tell one row of {table} from another")
    if not made.merges and (made.keys or made.order_by or made.change_column):
        raise ConfigError(
            "keys, order_by and change_column are for mode 'upsert' and 'delete'; this is 'append'"
        )
    if create_table and schema is None:
        raise ConfigError("create_table needs schema: the Arrow schema that the rows will have")
    return made


def make_strategy(name: str | None) -> Strategy | None:
    """None leaves the choice to the sink."""
    if name is None:
        return None
    try:
        return Strategy(name)
    except ValueError:
        raise ConfigError(f"{name!r} is not a strategy: choose 'direct' or 'staged'") from None


def _mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        raise ConfigError(f"{name!r} is not a mode: choose 'append', 'upsert' or 'delete'") from None
