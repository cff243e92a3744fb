"""Which transactions are said to block readers, from what leaders and coordinators say."""

import time
from collections.abc import Iterable

import pytest

from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.producer import ProducerIdentity
from semel.client.transaction_admin import (
    NO_TIMEOUT_MS,
    ActiveProducer,
    DescribedTransaction,
    TransactionAdmin,
)

HERE = TopicPartition("t", 0)
ELSEWHERE = TopicPartition("t", 1)
MINUTE_MS = 60_000


def writing(producer_id: int, start_offset: int | None = 5, where: TopicPartition = HERE) -> ActiveProducer:
    return ActiveProducer(where, ProducerIdentity(producer_id, 0), 0, 0, 0, start_offset)


def known(
    producer_id: int,
    *,
    state: str = "Ongoing",
    open_for_ms: int = 0,
    where: TopicPartition = HERE,
    timeout_ms: int = 1,
) -> DescribedTransaction:
    start_ms = int(time.time() * 1000) - open_for_ms
    return DescribedTransaction(
        f"id-{producer_id}", 1, state, ProducerIdentity(producer_id, 0), timeout_ms, start_ms, (where,)
    )


class Told(TransactionAdmin):
    """An admin that is told what the cluster says; the leaders may say something else when asked again."""

    def __init__(
        self,
        first: list[ActiveProducer],
        owners: Iterable[DescribedTransaction] = (),
        then: list[ActiveProducer] | None = None,
        *,
        stable: int = 5,
    ) -> None:
        super().__init__(Cluster("127.0.0.1:1"))
        self._answers = [first, first if then is None else then]
        self._known = {each.identity.producer_id: each for each in owners}
        self._stable = stable

    async def producers(self, partitions: Iterable[TopicPartition]) -> list[ActiveProducer]:
        wanted = set(partitions)
        return [each for each in self._answers.pop(0) if each.where in wanted]

    async def _ends(
        self, topic: str | None, include_internal: bool
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        return {HERE: 8, ELSEWHERE: 8}, {HERE: self._stable, ELSEWHERE: 8}

    async def _owners(self, producer_ids: set[int]) -> dict[int, DescribedTransaction]:
        return {key: value for key, value in self._known.items() if key in producer_ids}


async def test_what_no_coordinator_knows_hangs_however_young_it_is() -> None:
    (found,) = await Told([writing(1)]).find_blocking(MINUTE_MS)
    assert found.is_hanging
    assert (found.producer, found.open_for_ms, found.lag) == (writing(1), None, 3)


async def test_what_a_coordinator_knows_is_shown_when_it_is_old() -> None:
    owners = [known(1, open_for_ms=2 * MINUTE_MS), known(2, open_for_ms=MINUTE_MS // 2)]
    (found,) = await Told([writing(1), writing(2)], owners).find_blocking(MINUTE_MS)
    assert (found.transactional_id, found.is_hanging) == ("id-1", False)
    assert found.open_for_ms is not None
    assert found.open_for_ms >= 2 * MINUTE_MS


async def test_what_may_be_prepared_is_told_from_the_rest() -> None:
    owners = [known(1, timeout_ms=NO_TIMEOUT_MS), known(2, timeout_ms=NO_TIMEOUT_MS - 1)]
    found = await Told([writing(1), writing(2), writing(3)], owners).find_blocking(0)
    assert [each.is_two_phase for each in found] == [True, False, False]


@pytest.mark.parametrize("state", ["Empty", "CompleteCommit", "CompleteAbort", "Dead"])
async def test_what_its_coordinator_has_ended_hangs(state: str) -> None:
    (found,) = await Told([writing(1)], [known(1, state=state)]).find_blocking(0)
    assert found.is_hanging


@pytest.mark.parametrize("state", ["PrepareCommit", "PrepareAbort", "PrepareEpochFence"])
async def test_what_its_coordinator_is_ending_does_not_hang(state: str) -> None:
    assert await Told([writing(1)], [known(1, state=state)]).find_blocking(MINUTE_MS) == []


async def test_what_its_coordinator_has_open_elsewhere_hangs_here() -> None:
    (found,) = await Told([writing(1)], [known(1, where=ELSEWHERE)]).find_blocking(MINUTE_MS)
    assert found.is_hanging


@pytest.mark.parametrize("then", [[], [writing(1, None)], [writing(1, 7)]], ids=["gone", "ended", "next one"])
async def test_what_ended_between_the_questions_does_not_hang(then: list[ActiveProducer]) -> None:
    assert await Told([writing(1)], then=then).find_blocking(MINUTE_MS) == []


async def test_only_partitions_whose_readers_wait_are_looked_at() -> None:
    assert await Told([writing(1)], stable=8).find_blocking(0) == []
    assert await Told([writing(1, where=ELSEWHERE)]).find_blocking(0) == []
    assert await Told([writing(1, None)]).find_blocking(0) == []
