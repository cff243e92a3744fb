"""The handle on a running pipeline: Spark's query, the sinks that it feeds, and why it ended."""

import logging
import threading
from typing import TYPE_CHECKING, Any

from semel.errors import SemelError
from semel.sinks.sink import TransactionalSink
from semel.spark.epochs import EpochRunner, StoppedError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)


class PipelineQuery:
    """A query that `exactly_once` has started. Its methods are those of Spark's StreamingQuery.

    When the query ends, however it does, its sinks are closed.
    """

    def __init__(self, query: "StreamingQuery", runner: EpochRunner) -> None:
        self.query = query
        self._runner = runner
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name=f"semel watch {runner.name}", daemon=True).start()

    def _watch(self) -> None:
        try:
            self.query.awaitTermination()
        except Exception:  # it is told by `failure`
            log.debug("%r has ended with an error", self.name, exc_info=True)
        try:
            self._runner.close()
        finally:
            self._ended.set()  # whatever became of the sinks: it is waited for without a limit

    @property
    def name(self) -> str:
        """What `exactly_once` was given: under it the sinks remember what is committed."""
        return self._runner.name

    @property
    def id(self) -> str:
        """Spark's id of the query, the same for the life of its checkpoint."""
        return str(self.query.id)

    @property
    def sinks(self) -> list[TransactionalSink]:
        """The sinks, for their metrics and trackers."""
        return [each.sink for each in self._runner.sinks]

    @property
    def failure(self) -> BaseException | None:
        """What a batch was ended by, if one was: not what Spark made of it."""
        return self._runner.failure

    @property
    def attempts(self) -> int:
        """How often batches were written, to each sink by itself, those included that were spoiled."""
        return self._runner.attempts

    @property
    def skipped(self) -> int:
        """How many batches were committed already."""
        return self._runner.skipped

    @property
    def batches(self) -> int:
        """How many batches were written, and every sink has them."""
        return self._runner.batches

    @property
    def rows(self) -> int:
        """How many rows those batches have: each counts once, however many sinks it goes to."""
        return self._runner.rows

    @property
    def isActive(self) -> bool:  # noqa: N802 - PySpark's names, from here on
        """Whether Spark runs the query; its sinks may still be closing when it does not."""
        return bool(self.query.isActive)

    @property
    def lastProgress(self) -> Any:  # noqa: N802
        """What Spark tells of the last batch, as of its own queries; None before there is one."""
        return self.query.lastProgress

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802
        """Until the query has ended: True. After `timeout` seconds: False. Raises what ended it."""
        if not self._ended.wait(timeout):
            return False
        failure = self.failure
        if isinstance(failure, SemelError) and not isinstance(failure, StoppedError):
            raise failure
        self.query.awaitTermination()
        return True

    def processAllAvailable(self) -> None:  # noqa: N802
        """Until everything that is in the source by now is committed at every sink; for tests."""
        try:
            self.query.processAllAvailable()
        except Exception as error:
            if isinstance(self.failure, SemelError):
                raise self.failure from error
            raise

    def stop(self) -> None:
        """Ends the query, and waits until its sinks are closed. A batch that is under way is aborted."""
        self._runner.stop()
        self.query.stop()
        self._ended.wait()
