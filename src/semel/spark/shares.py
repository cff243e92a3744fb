"""Which rows of a batch go to which task. Nothing here evaluates the batch.

Rows stay where they are: where they say by key or column to which partition of a topic they go, tasks take
turns at the partitions, and a table takes rows from anywhere. Rows that say nothing go to partitions that
only their task writes to, and then there are no more tasks than partitions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.sinks.kafka import KafkaPlan
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.writers import StagedPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(slots=True, frozen=True)
class Shares:
    """A batch whose partitions can be written, each by a task of its own.

    Rows without a place go to the output partitions p mod `tasks` = i of task i.
    """

    rows: "DataFrame"
    tasks: int
    one_attempt: bool  # a task that Spark tries again writes nothing: the epoch is run again


def share_out(batch: "DataFrame", plan: WriterPlan) -> Shares:
    """Gives each task its rows."""
    tasks = max(partition_count(batch), 1)
    # What an attempt has brought into a transaction stays there; what it has staged does not.
    one_attempt = not isinstance(plan, StagedPlan)
    if isinstance(plan, KafkaPlan) and not plan.settings.takes_turns:
        # Every task needs a partition of its own in each topic: in the output, and in that of bad rows.
        most = min(shape.partition_count for shape in plan.settings.topics.values())
        if tasks > most:
            return Shares(batch.coalesce(most), most, one_attempt)
    return Shares(batch, tasks, one_attempt)


def partition_count(batch: "DataFrame") -> int:
    """How many partitions the batch has. Spark hands over an RDD, planned already: this runs nothing."""
    execution: Any = batch._jdf.queryExecution()
    return int(execution.toRdd().getNumPartitions())
