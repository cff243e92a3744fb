"""`exactly_once`: a streaming DataFrame into transactional sinks, each batch whole and once.

    sink = KafkaSink(bootstrap, "totals")
    query = exactly_once(totals, sink, name="totals", checkpoint="ck/totals").start()

Everything that can be checked is checked before a sink is opened, and all sinks are opened before the query
starts: opening fences whoever has a sink, and that is not to be for nothing.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import ConfigError
from semel.sinks.blocking import BlockingSink
from semel.sinks.sink import TransactionalSink
from semel.spark.checkpoint import Checkpoint
from semel.spark.columns import prepare_columns
from semel.spark.epochs import EpochRunner, close_all
from semel.spark.query import PipelineQuery
from semel.spark.session import LOOPBACK, require_classic
from semel.spark.source_cluster import cluster_of
from semel.spark.source_topics import require_topics
from semel.spark.transfer import runs_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# "availableNow", a duration such as "5 seconds", or the keyword of PySpark's `trigger` with its value.
Trigger: TypeAlias = str | Mapping[str, str | bool]

OUTPUT_MODES: Final = ("append", "update", "complete")
NAME: Final = re.compile(r"[\w.\- ]{1,150}")
DRIVER_HOST: Final = "spark.driver.host"
OPERATION_CHECK: Final = "spark.sql.streaming.unsupportedOperationCheck"
REFUSED_TRIGGERS: Final = ("continuous", "realTime")
TRIGGERS: Final = ("processingTime", "availableNow")


def exactly_once(
    df: "DataFrame",
    sink: TransactionalSink | Sequence[TransactionalSink],
    *,
    name: str,
    checkpoint: str | os.PathLike[str],
    output_mode: str = "append",
) -> "ExactlyOnce":
    """A pipeline from a streaming DataFrame to one sink, or several; `start` runs it.

    `name` is the identity under which the sinks remember what is committed: it stays the same for the life of
    the pipeline, and no other has it. `checkpoint` is Spark's, and belongs to this pipeline alone.
    """
    sinks = [sink] if isinstance(sink, TransactionalSink) else list(sink)
    if not sinks or not all(isinstance(each, TransactionalSink) for each in sinks):
        raise ConfigError("give a sink, or a list of sinks, such as KafkaSink(bootstrap, topic)")
    if len({id(each) for each in sinks}) < len(sinks):
        raise ConfigError("the same sink is given twice: make another one")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"name={name!r}: a pipeline needs a name of its own, of up to 150 letters, digits, '.', '_', '-' "
            "and spaces; the sinks remember under it what is committed"
        )
    location = os.fspath(checkpoint) if checkpoint else ""
    if not location:
        raise ConfigError(f"pipeline {name!r} needs checkpoint=, a directory of its own")
    if output_mode not in OUTPUT_MODES:
        raise ConfigError(f"output_mode is {output_mode!r}: it must be {', '.join(OUTPUT_MODES)}")
    _check_dataframe(df)
    columns = [prepare_columns(df, each) for each in sinks]
    return ExactlyOnce(df, sinks, columns, name, location, output_mode)


class ExactlyOnce:
    """A pipeline that has been checked and not been started."""

    def __init__(
        self,
        df: "DataFrame",
        sinks: list[TransactionalSink],
        columns: list[list[str]],
        name: str,
        checkpoint: str,
        output_mode: str,
    ) -> None:
        self._df = df
        self._sinks = sinks
        self._columns = columns
        self._name = name
        self._checkpoint = checkpoint
        self._output_mode = output_mode

    def start(self, trigger: Trigger | None = None) -> PipelineQuery:
        """Opens all sinks, which fences earlier owners, and starts the query."""
        writer = _with_trigger(self._df.writeStream, trigger)
        spark = self._df.sparkSession
        # All that may fail without a sink comes before the sinks: who would close them?
        self._refuse_as_spark_will()
        require_topics(self._df)
        checkpoint = Checkpoint(spark, self._checkpoint)
        source, has_python = cluster_of(self._df), runs_python(self._df)
        sinks = self._open_sinks(driver_host(spark), checkpoint)
        runner = EpochRunner(self._name, sinks, self._columns, checkpoint, source, has_python=has_python)
        try:
            query = (
                writer.queryName(self._name)
                .outputMode(self._output_mode)
                .option("checkpointLocation", self._checkpoint)
                .foreachBatch(runner.run)
                .start()
            )
        except BaseException:
            runner.close()
            raise
        return PipelineQuery(query, runner)

    def _refuse_as_spark_will(self) -> None:
        """What Spark looks at when a query starts, which is too late."""
        spark = self._df.sparkSession
        if any(query.name == self._name for query in spark.streams.active):
            raise ConfigError(
                f"pipeline {self._name!r} runs in this session: stop it first, or give another name"
            )
        if spark.conf.get(OPERATION_CHECK, "true") == "true":
            jvm: Any = spark.sparkContext._jvm
            mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, self._output_mode.capitalize())()
            checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
            checker.checkForStreaming(self._df._jdf.queryExecution().analyzed(), mode)

    def _open_sinks(self, driver_host: str, checkpoint: Checkpoint) -> list[BlockingSink]:
        """None stays open whose marker does not fit: it may be long until a batch comes and tells.

        What comes next is read when all are open: a driver that had them may have gone on until then.
        """
        opened: list[BlockingSink] = []
        try:
            for place, sink in enumerate(self._sinks):
                sink.share(driver_host)
                blocking = BlockingSink(sink)
                opened.append(blocking)
                blocking.open(sink_id(self._name, place), checkpoint.query_id())
            start = checkpoint.start()
            for sink in self._sinks:
                sink.require_fit(start)
        except BaseException:
            close_all(self._name, opened)
            raise
        return opened


def driver_host(spark: "SparkSession") -> str:
    """As executors find it. Spark has it as it stands in URLs: IPv6 in brackets."""
    return str(spark.conf.get(DRIVER_HOST, LOOPBACK)).strip("[]")


def sink_id(name: str, place: int) -> str:
    """The identity of a pipeline's sink: the first has the pipeline's name, so that others may be added."""
    return name if place == 0 else f"{name}/{place}"


def _check_dataframe(df: "DataFrame") -> None:
    require_classic(df)
    if not getattr(df, "isStreaming", False):
        raise ConfigError("this DataFrame does not stream: read it with readStream, or semel.spark.read")
    if os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "false":
        raise ConfigError("PYSPARK_PIN_THREAD=false hides from a batch which query it is of: unset it")


def _with_trigger(writer: "DataStreamWriter", trigger: Trigger | None) -> "DataStreamWriter":
    if trigger is None:
        return writer
    if isinstance(trigger, str):
        # A duration begins with a digit, or is of several words.
        trigger = {trigger: True} if trigger.isidentifier() else {"processingTime": trigger}
    for kind in trigger:
        if kind in REFUSED_TRIGGERS:
            raise ConfigError(
                f"the trigger {kind} has no batches, and a batch is what is committed: use processingTime "
                "or availableNow"
            )
        if kind not in TRIGGERS:
            raise ConfigError(f"there is no trigger {kind!r}: use {', '.join(TRIGGERS)}")
    keywords: dict[str, Any] = dict(trigger)
    try:
        return writer.trigger(**keywords)
    except Exception as error:  # of Spark, or of what it is reached through
        why = str(error).partition("\n")[0]
        raise ConfigError(f"Spark does not take the trigger {trigger}: {why}") from error
