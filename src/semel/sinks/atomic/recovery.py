"""Ending what an application left prepared, without the application.

A prepared transaction never times out: while its application is away, readers of its topics wait. Whoever
knows the database can end it, as the application itself would when it opens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import psycopg

from semel.client.cluster import Cluster
from semel.errors import NotFoundError
from semel.sinks.atomic.atomic import check_broker, check_clusters, describe_owner
from semel.sinks.atomic.database import SlotRow, TransactionTable, connect, one_line
from semel.sinks.atomic.settings import AtomicSettings
from semel.sinks.atomic.slot import Recovered, Slot
from semel.sinks.errors import InitFailed


class RecoveredSlot(NamedTuple):
    name: str
    transactional_id: str
    recovered: Recovered


async def recover(
    cluster: Cluster,
    postgres: str,
    names: Sequence[str] = (),
    *,
    force: bool = False,
    settings: AtomicSettings | None = None,
) -> list[RecoveredSlot]:
    """Ends what these names (all of the database, if none is given) have open, as their rows say.

    It fences whoever has such a name: an application that still has a session is left alone, unless by force.
    """
    settings = settings or AtomicSettings()
    cluster_id = await check_broker(cluster)
    rows = await _take(postgres, names, force, settings)
    check_clusters(rows, cluster_id)
    found: list[RecoveredSlot] = []
    for row in rows:
        slot = Slot(row, cluster, cluster_id, postgres, settings)
        try:
            recovered = await slot.mend()
        except psycopg.Error as error:
            raise InitFailed(f"{row.transactional_id!r} could not be recovered: {one_line(error)}") from error
        finally:
            await slot.release()
        found.append(RecoveredSlot(row.name, row.transactional_id, recovered))
    return found


async def _take(postgres: str, names: Sequence[str], force: bool, settings: AtomicSettings) -> list[SlotRow]:
    connection = await connect(postgres, settings, "semel txn recover")
    table = TransactionTable(connection, settings)
    try:
        known = await table.names() if await table.exists() else []
        if unknown := [name for name in names if name not in known]:
            raise NotFoundError(
                f"table {settings.table} of this database has no {unknown[0]!r}; it has {known or 'no names'}"
            )
        wanted = list(names) or known
        if not force:
            for name in wanted:
                await _refuse_living(table, name)
        return [row for name in wanted for row in await table.raise_owner(name, describe_owner())]
    except psycopg.Error as error:
        raise InitFailed(f"the rows of {settings.table} could not be taken: {one_line(error)}") from error
    finally:
        await connection.close()


async def _refuse_living(table: TransactionTable, name: str) -> None:
    if backends := await table.backends(name):
        owner = await table.owner_text(name)
        raise InitFailed(
            f"{name!r} is in use by {owner}, with {len(backends)} sessions in the database: it recovers by "
            f"itself. To fence it use force (`semel txn recover --force`)"
        )
