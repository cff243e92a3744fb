"""One life of a pipeline, as `semel run` starts it: `python -m semel.spark.running FILE …`.

The file has a function `pipeline(spark)` that returns what `exactly_once` made, or a list of such. Progress
goes to the supervisor as lines of JSON, over a pipe; when nobody reads it any more, the pipeline ends.
"""

import argparse
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from semel.errors import ConfigError, SemelError
from semel.sinks.errors import CommitFailed, FencedOut, InitFailed, MarkerMismatch, WriteFailed
from semel.spark.pipeline import ExactlyOnce
from semel.spark.progress import progress_of
from semel.spark.query import PipelineQuery
from semel.spark.session import DEFAULT_MASTER, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ENTRY: Final = "pipeline"
# Something was not as it should be; it may be the next time.
FAILED_EXIT: Final = 1
# To start again would not help.
FINAL_EXIT: Final = 2
PROGRESS_INTERVAL_S: Final = 0.5
# What is wrong with a file, and will be the next time.
MISTAKES: Final = (ImportError, NameError, AttributeError, TypeError)
# They tell at length of the errors that end a pipeline, and it is told here why one ended.
NOISY_JVM_LOGGER: Final = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
NOISY_PY4J_LOGGER: Final = "py4j"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--master", default=DEFAULT_MASTER)
    parser.add_argument("--setting", action="append", default=[])
    parser.add_argument("--until-caught-up", action="store_true")
    parser.add_argument("--trigger")
    parser.add_argument("--progress-fd", type=int)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger(NOISY_PY4J_LOGGER).setLevel(logging.CRITICAL)
    try:
        settings = dict(each.split("=", 1) for each in options.setting)
        trigger = "availableNow" if options.until_caught_up else options.trigger
        out = None if options.progress_fd is None else os.fdopen(options.progress_fd, "w", buffering=1)
        return run(options.file, options.master, settings, trigger, out)
    except SemelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - this is its output
        return FINAL_EXIT if is_final(error) else FAILED_EXIT
    except BrokenPipeError:
        log.warning("`semel run` is gone, and with it the pipeline; what it had open, the next start aborts")
        return FAILED_EXIT


def is_final(error: SemelError) -> bool:
    """Whether another start would surely meet it again, until somebody mends something."""
    if isinstance(error, InitFailed | WriteFailed | CommitFailed):
        return error.is_permanent
    return isinstance(error, ConfigError | MarkerMismatch | FencedOut)


def run(file: str, master: str, settings: dict[str, str], trigger: str | None, out: TextIO | None) -> int:
    """Until the input is read, or a signal asks to stop; raises what ended a pipeline."""
    check_syntax(file)  # before Spark, which takes a while to start
    spark = local_session(Path(file).name, master=master, settings=settings)
    jvm: Any = spark.sparkContext._jvm
    jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(NOISY_JVM_LOGGER, "OFF")
    return run_all(load(file, spark), trigger, out, StopRequest())


def run_all(
    pipelines: Sequence[ExactlyOnce], trigger: str | None, out: TextIO | None, stopping: "StopRequest"
) -> int:
    """Until all have read their input. One that fails, at its start or later, ends the others, too."""
    running: list[PipelineQuery] = []
    try:
        for pipeline in pipelines:
            running.append(pipeline.start(trigger))
        is_over = False
        while not is_over and not stopping.is_asked:
            # Each is asked, so that whichever fails is noticed: it raises.
            ended = [query.awaitTermination(PROGRESS_INTERVAL_S) for query in running]
            is_over = all(ended)
            _tell(out, running)
    finally:
        are_stopped = _stop(running)
    _tell(out, running)
    return 0 if are_stopped else FAILED_EXIT


def _stop(running: list[PipelineQuery]) -> bool:
    """Whether each could be stopped. One that could not is told of; why a pipeline ended is raised."""
    are_stopped = True
    for query in running:
        try:
            query.stop()
        except Exception as error:  # Py4J has its own
            log.warning("%r was not stopped: %s", query.name, error)
            are_stopped = False
    return are_stopped


class StopRequest:
    """SIGTERM and SIGINT end the pipeline between two looks at it."""

    def __init__(self) -> None:
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.is_asked = True


def check_syntax(file: str) -> None:
    """Whether the file can be read, and is Python."""
    try:
        compile(Path(file).read_bytes(), file, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"the pipeline cannot be read: {type(error).__name__}: {error}") from None


def load(file: str, spark: "SparkSession | None") -> list[ExactlyOnce]:
    """What the file's `pipeline(spark)` returns."""
    try:
        names = runpy.run_path(file, run_name="semel.pipeline")
        if not callable(names.get(ENTRY)):
            raise ConfigError(f"{file} has no function {ENTRY}(spark), which returns what exactly_once made")
        built = names[ENTRY](spark)
    except MISTAKES as error:
        raise ConfigError(f"{_place(error, file)}: {type(error).__name__}: {error}") from error
    pipelines = list(built) if isinstance(built, Iterable) else [built]
    if not pipelines or not all(isinstance(each, ExactlyOnce) for each in pipelines):
        raise ConfigError(f"{ENTRY}(spark) in {file} must return what exactly_once made, or a list of such")
    return pipelines


def _place(error: BaseException, file: str) -> str:
    """Where in the file: that is the user's own, whatever has been called from there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file


def _tell(out: TextIO | None, running: list[PipelineQuery]) -> None:
    if out is not None:
        for query in running:
            out.write(progress_of(query).encode() + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
