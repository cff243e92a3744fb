"""Small writes joined, so that what follows is done for many rows at a time.

Each write has types of its own: as they were given, or as Arrow makes them out of Python's values. Those that
have one in common are joined; the others go one after the other, as if each were alone. What a row comes to
does not depend on the writes beside its own.
"""

import pyarrow as pa


def join(tables: list[pa.Table]) -> list[pa.Table]:
    """One table, or several where their types have none in common; the rows stay in order."""
    if len(tables) < 2:
        return tables
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:  # no type has room for both, or for all of their values
        whole = None
    if whole is not None and not _alters(tables, whole.schema):
        return [whole]
    half = len(tables) // 2
    return join(tables[:half]) + join(tables[half:])


def _alters(tables: list[pa.Table], joined: pa.Schema) -> bool:
    """Whether joining would add fields to structs or change types inside them; as JSON that shows."""
    nested = {field.name: field.type for field in joined if pa.types.is_nested(field.type)}
    return bool(nested) and any(
        not field.type.equals(nested[field.name]) and not pa.types.is_null(field.type)
        for table in tables
        for field in table.schema
        if field.name in nested
    )
