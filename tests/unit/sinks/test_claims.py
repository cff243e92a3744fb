"""One attempt a task, one writer a partition; in this process and over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable

import pytest

from semel.client.metadata import Address, TopicPartition
from semel.errors import FatalError
from semel.sinks.claims import MAX_PARTITIONS_A_CLAIM, ClaimBook, ClaimService, LocalClaims, RemoteClaims
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import MAX_MESSAGE_BYTES, SIZE, ServiceAddress

PLACE = Place("run", 3, 1)
ZERO, ONE = TopicPartition("topic", 0), TopicPartition("topic", 1)


def claimant(task: int = 0, writer: str = "w0", place: Place = PLACE, attempt: str = "0") -> Attempt:
    return Attempt(place, task, attempt, writer)


def receipt(task: int, *parts: TopicPartition, attempt: str = "0") -> Receipt:
    return Receipt(PLACE, task, attempt, 1, 1, parts={str(where): 1 for where in parts})


@pytest.fixture
def book() -> ClaimBook:
    made = ClaimBook()
    made.open(PLACE)
    return made


class Joined:
    """What was taken into the transaction."""

    def __init__(self) -> None:
        self.partitions: list[TopicPartition] = []
        self.failure: FatalError | None = None

    async def __call__(self, partitions: Iterable[TopicPartition]) -> None:
        if self.failure is not None:
            raise self.failure
        self.partitions += partitions


# The book


def test_a_writer_may_claim_again_what_it_has(book: ClaimBook) -> None:
    assert book.claim(claimant(), [ZERO]) is None
    assert book.claim(claimant(), [ZERO, ONE]) is None
    book.check_covered([receipt(0, ZERO, ONE)])


def test_the_second_claimant_of_a_partition_spoils_the_epoch(book: ClaimBook) -> None:
    assert book.claim(claimant(0, "w0"), [ZERO]) is None
    refusal = book.claim(claimant(1, "w1"), [ONE, ZERO])
    assert refusal is not None
    assert "attempt 0 of task 1 and attempt 0 of task 0 both have rows for topic-0" in refusal
    with pytest.raises(CommitFailed, match="both have rows"):
        book.check_covered([receipt(0, ZERO)])


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_a_task_has_one_writer_even_if_attempts_are_counted_anew(book: ClaimBook, attempt: str) -> None:
    assert book.claim(claimant(0, "w0"), [ZERO]) is None
    refusal = book.claim(claimant(0, "w1", attempt=attempt), [ONE])
    assert refusal is not None
    assert "task 0 was tried twice" in refusal
    assert book.spoiled is not None


@pytest.mark.parametrize("place", [Place("old", 3, 1), Place("run", 2, 1), Place("run", 3, 2)])
def test_a_zombie_is_refused_and_spoils_nothing(book: ClaimBook, place: Place) -> None:
    refusal = book.claim(claimant(0, "zombie", place), [ZERO])
    assert refusal is not None
    assert "which is over" in refusal
    assert book.spoiled is None
    assert book.claim(claimant(), [ZERO]) is None
    book.check_covered([receipt(0, ZERO)])


def test_nothing_is_claimed_between_epochs_and_a_new_one_begins_clean(book: ClaimBook) -> None:
    book.claim(claimant(0, "w0"), [ZERO])
    book.claim(claimant(1, "w1"), [ZERO])
    book.close()
    assert book.claim(claimant(0, "w0"), [ZERO]) is not None
    following = Place("run", 4, 2)
    book.open(following)
    assert book.spoiled is None
    assert book.claim(claimant(5, "w5", following), [ZERO]) is None


def test_receipts_must_cover_exactly_what_was_claimed(book: ClaimBook) -> None:
    book.claim(claimant(0, "w0"), [ZERO])
    book.claim(claimant(1, "w1"), [ONE])
    book.check_covered([receipt(0, ZERO), receipt(1, ONE), receipt(2)])
    for wrong in (
        [receipt(0, ZERO)],  # task 1 has written, and its rows would not be counted
        [receipt(0, ZERO), receipt(1)],  # of an attempt that had no rows
        [receipt(0, ZERO), receipt(1, ONE, attempt="1")],
        [receipt(0, ZERO, ONE), receipt(1, ONE)],
        [receipt(0, ZERO), receipt(1, ONE), receipt(2, ONE)],
    ):
        with pytest.raises(CommitFailed):
            book.check_covered(wrong)


# Ways to it


async def test_a_claim_takes_the_partition_into_the_transaction(book: ClaimBook) -> None:
    joined = Joined()
    claims = LocalClaims(book, joined)
    await claims.claim(claimant(), [ZERO])
    assert joined.partitions == [ZERO]
    joined.failure = FatalError("no such topic", 3)
    with pytest.raises(WriteFailed, match="did not join the transaction: no such topic"):
        await claims.claim(claimant(), [ONE])


async def test_writers_in_other_threads_claim_in_the_owners_loop(book: ClaimBook) -> None:
    claims = LocalClaims(book, Joined())
    await asyncio.to_thread(asyncio.run, claims.claim(claimant(0, "w0"), [ZERO]))
    with pytest.raises(WriteFailed, match="both have rows"):
        await asyncio.to_thread(asyncio.run, claims.claim(claimant(1, "w1"), [ZERO]))


def sized(message: bytes) -> bytes:
    return SIZE.pack(len(message)) + message


class Served:
    """A claim service and its address."""

    def __init__(self, book: ClaimBook) -> None:
        self.book = book
        self.joined = Joined()
        self.service = ClaimService(LocalClaims(book, self.joined))
        self.address = ServiceAddress(Address("", 0), "")

    async def say(self, message: bytes) -> bytes:
        """What the service answers; empty if it hangs up."""
        reader, writer = await asyncio.open_connection(*self.address.address)
        try:
            writer.write(message)
            return await reader.read(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    def claim(self, **changes: object) -> bytes:
        fields: dict[str, object] = {
            "token": self.address.token,
            "run": PLACE.run,
            "epoch": PLACE.epoch,
            "turn": PLACE.turn,
            "task": 0,
            "attempt": "0",
            "writer": "w0",
            "topic": "topic",
            "partitions": [0],
        }
        fields.update(changes)
        return sized(json.dumps(fields).encode())


@pytest.fixture
async def served(book: ClaimBook) -> AsyncIterator[Served]:
    made = Served(book)
    made.address = await made.service.start("127.0.0.1")
    yield made
    await made.service.stop()


async def test_claims_over_a_socket_follow_the_same_rules(served: Served) -> None:
    first, second = RemoteClaims(served.address), RemoteClaims(served.address)
    many = [TopicPartition("topic", index) for index in range(MAX_PARTITIONS_A_CLAIM + 1)]
    await first.claim(claimant(0, "w0"), [*many, TopicPartition("other", 0)])
    await first.claim(claimant(0, "w0"), [ZERO])
    assert len(set(served.joined.partitions)) == MAX_PARTITIONS_A_CLAIM + 2
    with pytest.raises(WriteFailed, match="both have rows for topic-0"):
        await second.claim(claimant(1, "w1"), [ZERO])
    with pytest.raises(WriteFailed, match="which is over"):
        await second.claim(claimant(1, "w1", Place("old", 3, 1)), [ZERO])
    first.close()
    second.close()


async def test_a_claim_without_the_secret_is_hung_up_on(served: Served) -> None:
    impostor = RemoteClaims(served.address._replace(token="0" * 64))
    with pytest.raises(WriteFailed, match="closed the connection: it knows no such run"):
        await impostor.claim(claimant(), [ZERO])
    assert served.book.claim(claimant(0, "another"), [ZERO]) is None, "the impostor's claim was taken"


@pytest.mark.parametrize(
    "message",
    [
        sized(b""),
        sized(b"[]"),
        sized(b"null"),
        sized(b"{}"),
        sized(b"\xff\xfe"),
        b"GET / HTTP/1.1\r\n\r\n",
        sized(b"[" * 20_000),
        sized(b"x" * (2 * MAX_MESSAGE_BYTES)),
    ],
    ids=["empty", "list", "null", "bare", "bytes", "http", "deep", "long"],
)
async def test_nonsense_is_hung_up_on_and_the_service_goes_on(served: Served, message: bytes) -> None:
    assert await served.say(message) == b""
    await RemoteClaims(served.address).claim(claimant(), [ZERO])


@pytest.mark.parametrize("changes", [{"partitions": []}, {"partitions": None}, {"task": None}, {"epoch": {}}])
async def test_a_claim_of_wrong_types_is_hung_up_on(served: Served, changes: dict[str, object]) -> None:
    assert await served.say(served.claim(**changes)) == b""
    assert served.joined.partitions == []


async def test_an_owner_that_is_gone_is_named(served: Served) -> None:
    await served.service.stop()
    host, port = served.address.address
    with pytest.raises(WriteFailed, match=f"from the sink's owner at {host}:{port}.*Is the owner alive"):
        await RemoteClaims(served.address).claim(claimant(), [ZERO])
