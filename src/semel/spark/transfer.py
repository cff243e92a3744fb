"""How rows travel from Spark to the Python of its tasks: in Arrow batches of bounded size, at little cost.

Spark bounds these batches by records and by bytes. For the latter it adds up the buffers of all columns after
every row, which takes a quarter of the time that it needs to hand rows over. Where no row is larger than the
one bound divided by the other, no batch can be too large, and there is nothing to add up. So a row's size is
looked at while it is computed, and Spark is told that bytes have no bound. A row that is too large for that
ends the job; from then on Spark adds up. Where a query has Python of its own, which gets other rows in the
same job, Spark adds up from the start.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from semel.sinks.errors import WriteFailed
from semel.spark.columns import INTEGERS, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
MAX_RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Spark's number for no bound.
UNBOUNDED: Final = str(2**31 - 1)
# What a field takes beside the bytes of a text: 16 bytes of a decimal at most, and a bit for null.
FIELD_BYTES: Final = 17
TEXTS: Final = frozenset({"string", "binary", "char", "varchar"})
MOMENTS: Final = frozenset({"date", "timestamp", "timestamp_ntz"})
TELLABLE: Final = TEXTS | MOMENTS | {*INTEGERS, "float", "double", "decimal", "boolean"}
LARGE_ROW: Final = "a row is too large for batches that nobody measures"


class Transfer:
    """Of the rows of one sink, in one life of its pipeline.

    `has_python` is whether the query runs Python itself, before its rows come here.
    """

    def __init__(self, *, has_python: bool) -> None:
        self._is_decided = has_python
        self._guarded: list[str] | None = None
        self._bound = ""

    @contextmanager
    def prepared(self, batch: "DataFrame") -> Iterator["DataFrame"]:
        """The batch, for a job that is run within the context; WriteFailed says that another may succeed."""
        settings: Any = batch.sparkSession.conf
        if not self._is_decided:
            self._is_decided, self._bound = True, settings.get(MAX_BYTES)
            row_bytes = _row_bytes(batch.sparkSession, self._bound, int(settings.get(MAX_RECORDS)))
            types = {field.name: field.dataType.simpleString() for field in batch.schema.fields}
            self._guarded = guarded_columns(types, row_bytes)
        if self._guarded is None:
            yield batch
            return
        settings.set(MAX_BYTES, UNBOUNDED)
        try:
            yield batch.selectExpr(*self._guarded)
        except Exception as error:
            if LARGE_ROW not in str(error):
                raise
            self._guarded = None
            raise WriteFailed(f"{LARGE_ROW}: from now on Spark measures them") from error
        finally:
            settings.set(MAX_BYTES, self._bound)


def runs_python(df: "DataFrame") -> bool:
    """Whether the query itself hands rows to Python: in the same job, whose batches would have no bound."""
    jvm: Any = df.sparkSession.sparkContext._jvm
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    plan: Any = df._jdf.queryExecution().analyzed()
    # Functions that make rows may be Python, too, and Spark does not tell them from its own.
    return any(plan.containsPattern(each) for each in (patterns.PYTHON_UDF(), patterns.GENERATOR()))


def _row_bytes(session: "SparkSession", max_bytes: str, max_records: int) -> int:
    """How large rows may be so that no batch is too large; 0 if there is no bound on records, or on bytes."""
    jvm: Any = session.sparkContext._jvm
    bound: int = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(max_bytes)
    return bound // max_records if max_records > 0 and bound < int(UNBOUNDED) else 0


def guarded_columns(types: Mapping[str, str], row_bytes: int) -> list[str] | None:
    """The columns as they are, in SQL, with an error for a larger row. None where sizes cannot be told."""
    kinds = {name: type_name.partition("(")[0].partition(" ")[0] for name, type_name in types.items()}
    text_bytes = row_bytes - FIELD_BYTES * len(kinds)
    is_ambiguous = len({name.lower() for name in kinds}) < len(kinds)
    if text_bytes < 0 or is_ambiguous or not set(kinds.values()) <= TELLABLE:
        return None
    texts = [quoted(name) for name, kind in kinds.items() if kind in TEXTS]
    size = " + ".join(f"coalesce(octet_length({text}), 0)" for text in texts)
    columns = [quoted(name) for name in kinds]
    if texts:
        checked = f"CASE WHEN {size} <= {text_bytes} THEN {texts[0]} ELSE raise_error('{LARGE_ROW}') END"
        columns[columns.index(texts[0])] = f"{checked} AS {texts[0]}"
    return columns
