"""A sink whose target is a dictionary: what the contract's core is tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from semel.sinks.errors import SinkError
from semel.sinks.marker import NO_MARKER, Marker, Owner
from semel.sinks.receipts import Place, Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import Rows, TransactionalSink, Writer, WriterPlan
from semel.sinks.source_group import SourceOffsets


class MemoryTarget:
    """Rows and marker, and what is to go wrong next."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, object]] = []
        self.marker = NO_MARKER
        self.failures: dict[str, BaseException] = {}
        self.calls: list[str] = []

    def call(self, name: str) -> None:
        self.calls.append(name)
        failure = self.failures.pop(name, None)
        if failure is not None:
            raise failure


class MemoryWriter(Writer):
    def __init__(self, plan: MemoryPlan, task: int, attempt: str) -> None:
        self._plan = plan
        self._task = task
        self._attempt = attempt
        self._rows: list[Mapping[str, object]] = []

    async def write(self, rows: Rows) -> None:
        self._plan.target.call("write")
        self._rows += cast("Sequence[Mapping[str, object]]", rows)

    async def finish(self) -> Receipt:
        self._plan.staged[self._task] = self._rows
        return Receipt(self._plan.place, self._task, self._attempt, len(self._rows), 10 * len(self._rows))

    async def cancel(self) -> None:
        self._plan.target.calls.append("cancel")


class MemoryPlan(WriterPlan):
    def __init__(self, target: MemoryTarget, place: Place) -> None:
        self.target = target
        self.place = place
        self.staged: dict[int, list[Mapping[str, object]]] = {}

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> MemoryWriter:
        return MemoryWriter(self, task, attempt)


class MemorySink(TransactionalSink):
    def __init__(self, target: MemoryTarget, settings: SinkSettings | None = None) -> None:
        super().__init__(settings)
        self.target = target

    async def _open(self, owner: Owner) -> Marker:
        self._check_before_fencing(self.target.marker)
        self.target.call("open")
        return self.target.marker

    async def _begin(self, place: Place) -> MemoryPlan:
        self.target.call("begin")
        return MemoryPlan(self.target, place)

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        self.target.call("commit")
        plan = cast("MemoryPlan", self.plan)
        for receipt in receipts:
            self.target.rows += plan.staged[receipt.task]
        self.target.marker = marker

    async def _abort(self) -> None:
        self.target.call("abort")

    async def _close(self) -> None:
        self.target.calls.append("close")


def failing(name: str, error: SinkError | BaseException) -> MemoryTarget:
    target = MemoryTarget()
    target.failures[name] = error
    return target
