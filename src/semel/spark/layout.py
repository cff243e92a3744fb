"""Which rows of a batch go to which task, so that every output partition of Kafka is written by one task.

The table is in docs/design/spark_epoch.md. Nothing here evaluates the batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.sinks.kafka import KafkaPlan
from semel.sinks.kafka.encoded import can_encode_early
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.writers import DirectPlan
from semel.sinks.tasks import ENCODED_SCHEMA, TARGET_COLUMN, EncodeTask, TargetTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(slots=True, frozen=True)
class Layout:
    """A batch whose partitions can be written, each by a task of its own.

    Task i owns the output partitions p mod `owners` = i.
    """

    rows: "DataFrame"
    owners: int
    is_once: bool  # one attempt a task
    is_encoded: bool = False  # rows are record batches


def lay_out(batch: "DataFrame", plan: WriterPlan) -> Layout:
    """Gives each task its rows."""
    partitions = partition_count(batch)
    if not isinstance(plan, KafkaPlan):
        # What an attempt has brought into an epoch's transaction stays there; what it has staged does not.
        return Layout(batch, max(partitions, 1), is_once=isinstance(plan, DirectPlan))
    if partitions <= 1:
        return Layout(batch, 1, is_once=True)
    columns = plan.settings.layout
    if columns.topic is not None:
        return _by_topic(batch, plan)
    # Every task needs a partition of its own in each topic: in the output, and in that of bad rows.
    most = min(shape.partition_count for shape in plan.settings.topics.values())
    if columns.key is None and columns.partition is None:
        tasks = min(partitions, most)
        return Layout(batch.coalesce(tasks), tasks, is_once=True)
    tasks = min(_parallelism(batch), most)
    if tasks == 1:
        return Layout(batch.coalesce(1), 1, is_once=True)
    if can_encode_early(plan):
        encoded = batch.mapInArrow(EncodeTask(plan).run, ENCODED_SCHEMA)
        return Layout(encoded.repartitionById(tasks, TARGET_COLUMN), tasks, is_once=True, is_encoded=True)
    return Layout(_shuffled(batch, plan, tasks), tasks, is_once=True)


def _by_topic(batch: "DataFrame", plan: KafkaPlan) -> Layout:
    """How many partitions the topics have that rows name is not known here: each is written by one task."""
    if plan.settings.dead_letter_topic is not None:
        return Layout(batch.coalesce(1), 1, is_once=True)  # bad rows of all topics go to that one
    return Layout(_shuffled(batch, plan, _parallelism(batch)), 1, is_once=True)


def partition_count(batch: "DataFrame") -> int:
    """How many partitions the batch has. Spark hands over an RDD, planned already: this runs nothing."""
    execution: Any = batch._jdf.queryExecution()
    return int(execution.toRdd().getNumPartitions())


def _parallelism(batch: "DataFrame") -> int:
    return max(batch.sparkSession.sparkContext.defaultParallelism, 1)


def _shuffled(batch: "DataFrame", plan: KafkaPlan, tasks: int) -> "DataFrame":
    """Rows by their target; the number is explicit, or adaptive execution would merge tasks."""
    from pyspark.sql.types import IntegerType, StructField, StructType

    settings = plan.settings
    target = TargetTask(settings.layout, settings.topic, settings.topics[settings.topic].partition_count)
    schema = StructType([*batch.schema.fields, StructField(TARGET_COLUMN, IntegerType())])
    return batch.mapInArrow(target.run, schema).repartitionById(tasks, TARGET_COLUMN)
