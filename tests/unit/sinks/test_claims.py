"""One attempt a task, one writer a partition; in this process and over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable

import pytest

from semel.client.metadata import Address, TopicPartition
from semel.errors import FatalError
from semel.sinks import service
from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.kafka.claim_service import ClaimService, LocalClaims, RemoteClaims
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import MAX_MESSAGE_BYTES, MAX_STRANGERS, SIZE, ServiceAddress, dial

PLACE = Place("run", 3, 1)
TOPIC = TopicShape(2, 1_000_000)
ZERO, ONE = TopicPartition("topic", 0), TopicPartition("topic", 1)


def claimant(task: int = 0, writer: str = "w0", place: Place = PLACE, attempt: str = "0") -> Attempt:
    return Attempt(place, task, attempt, writer)


def receipt(task: int, parts: dict[TopicPartition, int], attempt: str = "0") -> Receipt:
    rows = {str(where): count for where, count in parts.items()}
    return Receipt(PLACE, task, attempt, sum(rows.values()), 1, parts=rows)


@pytest.fixture
def book() -> ClaimBook:
    made = ClaimBook()
    made.open(PLACE)
    return made


async def two_partitions(topic: str) -> TopicShape | None:
    """The shape of every topic but one that is not there, one that may not be looked at, and a defect."""
    if topic == "forbidden":
        raise FatalError("ask for an ACL", 29)
    if topic == "broken":
        raise RuntimeError("a defect")
    return None if topic == "nowhere" else TOPIC


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


async def test_writers_take_turns_in_the_order_in_which_they_come(book: ClaimBook) -> None:
    assert await book.take(claimant(0, "w0"), ZERO) == 0
    second, third = (asyncio.ensure_future(book.take(claimant(task, f"w{task}"), ZERO)) for task in (1, 2))
    await asyncio.sleep(0)
    assert not second.done()
    book.give(claimant(0, "w0"), ZERO, 10)
    assert await second == 10
    assert not third.done()
    assert await book.take(claimant(0, "w0"), ONE) == 0, "another partition is another line"
    book.give(claimant(1, "w1"), ZERO, 25)
    assert await third == 25
    book.give(claimant(2, "w2"), ZERO, 26)
    book.give(claimant(0, "w0"), ONE, 4)
    assert await book.take(claimant(0, "w0"), ZERO) == 26
    book.give(claimant(0, "w0"), ZERO, 27)
    book.check_covered(
        [receipt(0, {ZERO: 11, ONE: 4}), receipt(1, {ZERO: 15}), receipt(2, {ZERO: 1}), receipt(3, {})]
    )


async def test_one_who_gives_up_waiting_is_passed_over(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ZERO)
    waiting = [asyncio.ensure_future(book.take(claimant(task, f"w{task}"), ZERO)) for task in (1, 2, 3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    book.give(claimant(0, "w0"), ZERO, 5)
    waiting[1].cancel()  # in the moment in which it gets its turn
    assert await waiting[2] == 5


async def test_the_second_claimant_of_a_partition_that_is_kept_spoils_the_epoch(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ZERO, keeps=True)
    with pytest.raises(WriteFailed, match="attempt 0 of task 1 has rows for topic-0, which another keeps"):
        await book.take(claimant(1, "w1"), ZERO, keeps=True)
    with pytest.raises(CommitFailed, match="which another keeps"):
        book.check_covered([receipt(0, {ZERO: 1})])


async def test_a_partition_that_was_kept_is_nobody_elses_afterwards(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ZERO, keeps=True)
    book.give(claimant(0, "w0"), ZERO, 3)
    with pytest.raises(WriteFailed, match="which another keeps"):
        await book.take(claimant(1, "w1"), ZERO, keeps=True)


@pytest.mark.parametrize("attempt", ["0", "1"])
async def test_a_task_has_one_writer_even_if_attempts_are_counted_anew(book: ClaimBook, attempt: str) -> None:
    await book.take(claimant(0, "w0"), ZERO)
    waiting = asyncio.ensure_future(book.take(claimant(1, "w1"), ZERO))
    await asyncio.sleep(0)
    with pytest.raises(WriteFailed, match="task 0 was tried twice"):
        await book.take(claimant(0, "other", attempt=attempt), ONE)
    with pytest.raises(WriteFailed, match="task 0 was tried twice"):
        await waiting  # nobody waits for an epoch that is spoiled
    with pytest.raises(WriteFailed, match="task 0 was tried twice"):
        await book.take(claimant(2, "w2"), ONE)
    with pytest.raises(CommitFailed, match="task 0 was tried twice"):
        book.check_covered([])


@pytest.mark.parametrize("place", [Place("old", 3, 1), Place("run", 2, 1), Place("run", 3, 2)])
async def test_a_zombie_is_refused_and_spoils_nothing(book: ClaimBook, place: Place) -> None:
    zombie = claimant(0, "zombie", place)
    with pytest.raises(WriteFailed, match="which is over"):
        await book.take(zombie, ZERO)
    with pytest.raises(WriteFailed, match="which is over"):
        book.give(zombie, ZERO, 1)
    book.leave(zombie)
    await book.take(claimant(), ZERO)
    book.give(claimant(), ZERO, 1)
    book.check_covered([receipt(0, {ZERO: 1})])


async def test_a_writer_that_goes_away_with_a_partition_spoils_the_epoch(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ONE)
    book.give(claimant(0, "w0"), ONE, 1)
    await book.take(claimant(0, "w0"), ZERO)
    waiting = asyncio.ensure_future(book.take(claimant(1, "w1"), ZERO))
    await asyncio.sleep(0)
    book.leave(claimant(1, "another of that task"))
    with pytest.raises(CommitFailed, match="still writes to topic-0"):
        book.check_covered([])
    book.leave(claimant(0, "w0"))
    with pytest.raises(WriteFailed, match="went away while it wrote to topic-0"):
        await waiting
    with pytest.raises(CommitFailed, match="went away"):
        book.check_covered([receipt(0, {ONE: 1})])


async def test_what_is_not_in_hand_cannot_be_given_back(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ZERO)
    with pytest.raises(WriteFailed, match="gives topic-0 back, and does not have it"):
        book.give(claimant(1, "w1"), ZERO, 7)
    with pytest.raises(CommitFailed, match="gives topic-0 back, and does not have it"):
        book.check_covered([])


async def test_nothing_is_claimed_between_epochs_and_a_new_one_begins_clean(book: ClaimBook) -> None:
    await book.take(claimant(0, "w0"), ZERO)
    waiting = asyncio.ensure_future(book.take(claimant(1, "w1"), ZERO))
    await asyncio.sleep(0)
    book.close()
    with pytest.raises(WriteFailed, match="the epoch is over"):
        await waiting
    with pytest.raises(WriteFailed, match="which is over"):
        await book.take(claimant(0, "w0"), ZERO)
    following = Place("run", 4, 2)
    book.open(following)
    assert await book.take(claimant(5, "w5", following), ZERO) == 0


async def test_receipts_must_cover_exactly_what_was_written(book: ClaimBook) -> None:
    for task, where, rows in ((0, ZERO, 3), (1, ONE, 2)):
        await book.take(claimant(task, f"w{task}"), where)
        book.give(claimant(task, f"w{task}"), where, rows)
    first, second = receipt(0, {ZERO: 3}), receipt(1, {ONE: 2})
    book.check_covered([first, second, receipt(2, {})])
    for wrong in (
        [first],  # task 1 has written, and its rows would not be counted
        [first, receipt(1, {})],  # of an attempt that had no rows
        [first, receipt(1, {ONE: 1})],
        [first, receipt(1, {ONE: 2}, attempt="1")],
        [receipt(0, {ZERO: 3, ONE: 2}), second],
        [first, second, receipt(2, {ONE: 1})],
    ):
        with pytest.raises(CommitFailed):
            book.check_covered(wrong)
    await book.take(claimant(0, "w0"), ZERO)
    with pytest.raises(CommitFailed, match="still writes to topic-0"):
        book.check_covered([first, second])


# Ways to it


async def test_the_first_turn_takes_the_partition_into_the_transaction(book: ClaimBook) -> None:
    joined = Joined()
    claims = LocalClaims(book, joined, two_partitions)
    await claims.take(claimant(), ZERO, keeps=False)
    await claims.give(claimant(), ZERO, 4)
    assert await claims.take(claimant(), ZERO, keeps=False) == 4
    assert joined.partitions == [ZERO]
    joined.failure = FatalError("no such topic", 3)
    with pytest.raises(WriteFailed, match="did not join the transaction: no such topic"):
        await claims.take(claimant(), ONE, keeps=False)


async def test_writers_in_other_threads_claim_in_the_owners_loop(book: ClaimBook) -> None:
    claims = LocalClaims(book, Joined(), two_partitions)
    await asyncio.to_thread(asyncio.run, claims.take(claimant(0, "w0"), ZERO, keeps=True))
    with pytest.raises(WriteFailed, match="which another keeps"):
        await asyncio.to_thread(asyncio.run, claims.take(claimant(1, "w1"), ZERO, keeps=True))


async def test_shapes_are_told_by_the_owner_wherever_the_writer_is(served: Served) -> None:
    zombie = claimant(place=Place("old", 3, 1))
    home = LocalClaims(served.book, Joined(), two_partitions)
    remote, late = RemoteClaims(served.address, 10.0), RemoteClaims(served.address, 10.0)
    for claims, others in ((home, home), (remote, late)):
        assert await claims.shape(claimant(), "topic") == TOPIC
        assert await claims.shape(claimant(), "nowhere") is None
        with pytest.raises(WriteFailed, match="'forbidden' could not be looked up: ask for an ACL"):
            await claims.shape(claimant(), "forbidden")
        with pytest.raises(WriteFailed, match="which is over"):
            await others.shape(zombie, "topic")
    with pytest.raises(WriteFailed, match="a defect"):
        await remote.shape(claimant(), "broken")
    await remote.leave(claimant())
    await late.leave(zombie)
    served.book.check_covered([])


def sized(message: bytes) -> bytes:
    return SIZE.pack(len(message)) + message


class Served:
    """A claim service and its address."""

    def __init__(self, book: ClaimBook) -> None:
        self.book = book
        self.joined = Joined()
        self.service = ClaimService(LocalClaims(book, self.joined, two_partitions))
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

    def greeting(self, **changes: object) -> bytes:
        fields: dict[str, object] = {
            "token": self.address.token,
            "run": PLACE.run,
            "epoch": PLACE.epoch,
            "turn": PLACE.turn,
            "task": 0,
            "attempt": "0",
            "writer": "w0",
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
    first, second = RemoteClaims(served.address, 10.0), RemoteClaims(served.address, 10.0)
    one, other = claimant(0, "w0"), claimant(1, "w1")
    # Many at once, and one that waits does not hold up the others.
    many = [TopicPartition("topic", index) for index in range(100)]
    assert await asyncio.gather(*(first.take(one, where, keeps=False) for where in many)) == [0] * 100
    waiting = asyncio.ensure_future(second.take(other, ZERO, keeps=False))
    assert await second.take(other, TopicPartition("other", 0), keeps=False) == 0
    assert not waiting.done()
    await first.give(one, ZERO, 12)
    assert await waiting == 12
    late = RemoteClaims(served.address, 10.0)
    with pytest.raises(WriteFailed, match="which is over"):
        await late.take(claimant(2, "w2", Place("old", 3, 1)), ZERO, keeps=False)
    await late.leave(claimant(2, "w2"))
    with pytest.raises(CommitFailed, match="still writes to"):
        served.book.check_covered([])
    await first.leave(one)  # with 99 partitions in its hands
    with pytest.raises(WriteFailed, match="went away while it wrote to"):
        await second.give(other, ZERO, 13)
    await second.leave(other)


async def test_a_process_that_dies_with_a_partition_in_its_hands_spoils_the_epoch(served: Served) -> None:
    dying, waiting = RemoteClaims(served.address, 10.0), RemoteClaims(served.address, 10.0)
    await dying.take(claimant(0, "w0"), ZERO, keeps=False)
    turn = asyncio.ensure_future(waiting.take(claimant(1, "w1"), ZERO, keeps=False))
    await asyncio.sleep(0)
    await dying.leave(claimant(0, "w0"))
    with pytest.raises(WriteFailed, match="attempt 0 of task 0 went away"):
        await turn
    await waiting.leave(claimant(1, "w1"))


async def test_a_writer_whose_owner_goes_away_does_not_wait_for_ever(served: Served) -> None:
    first, second = RemoteClaims(served.address, 10.0), RemoteClaims(served.address, 10.0)
    await first.take(claimant(0, "w0"), ZERO, keeps=False)
    turn = asyncio.ensure_future(second.take(claimant(1, "w1"), ZERO, keeps=False))
    await asyncio.sleep(0)
    await served.service.stop()
    with pytest.raises(WriteFailed, match="Is the owner alive"):
        await turn
    with pytest.raises(WriteFailed, match="Is the owner alive"):
        await first.give(claimant(0, "w0"), ZERO, 1)
    await first.leave(claimant(0, "w0"))
    await second.leave(claimant(1, "w1"))


async def test_a_claim_without_the_secret_is_hung_up_on(served: Served) -> None:
    impostor = RemoteClaims(served.address._replace(token="0" * 64), 10.0)
    with pytest.raises(WriteFailed, match=r"closed the connection: it knows no such run|reset by peer"):
        await impostor.take(claimant(), ZERO, keeps=True)
    await impostor.leave(claimant())
    assert await served.book.take(claimant(0, "another"), ZERO) == 0, "the impostor's claim was taken"


async def test_writers_that_come_all_at_once_are_all_heard(served: Served) -> None:
    """Before the owner has met the first of them, more are there than strangers are let in."""
    writers = [RemoteClaims(served.address, 10.0) for _ in range(2 * MAX_STRANGERS)]
    claimants = [claimant(task, f"w{task}") for task in range(len(writers))]
    takes = [
        writer.take(who, TopicPartition("topic", who.task), keeps=False)
        for writer, who in zip(writers, claimants, strict=True)
    ]
    assert await asyncio.gather(*takes) == [0] * len(writers)
    for writer, who in zip(writers, claimants, strict=True):
        await writer.leave(who)


async def test_strangers_that_say_nothing_do_not_keep_writers_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STRANGER_PATIENCE_S", 0.0)
    strangers = [await asyncio.open_connection(*served.address.address) for _ in range(2 * MAX_STRANGERS)]
    claims = RemoteClaims(served.address, 10.0)
    assert await claims.take(claimant(), ZERO, keeps=False) == 0
    for reader, _ in strangers[:MAX_STRANGERS]:
        assert await reader.read() == b"", "the oldest are sent away"
    await claims.leave(claimant())
    for _, writer in strangers:
        writer.close()


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
    claims = RemoteClaims(served.address, 10.0)
    await claims.take(claimant(), ZERO, keeps=False)
    await claims.leave(claimant())


@pytest.mark.parametrize("changes", [{"task": None}, {"epoch": {}}, {"run": None, "turn": "x"}])
async def test_a_writer_of_wrong_types_is_hung_up_on(served: Served, changes: dict[str, object]) -> None:
    assert await served.say(served.greeting(**changes)) == b""


@pytest.mark.parametrize("request_", [{}, {"number": -1}, {"number": "1"}, {"number": None}])
async def test_a_request_without_a_number_is_hung_up_on(served: Served, request_: dict[str, object]) -> None:
    assert await served.say(served.greeting() + sized(json.dumps(request_).encode())) == b""


@pytest.mark.parametrize("changes", [{"partition": None}, {"partition": -1}, {"gives": -3}, {"gives": "all"}])
async def test_a_claim_of_wrong_types_is_refused(served: Served, changes: dict[str, object]) -> None:
    request = {"number": 1, "topic": "topic", "partition": 0, **changes}
    channel = await dial(served.address, claimant().fields())
    await channel.say(request)
    assert "is no number" in (await channel.hear())["refused"]
    channel.close()
    assert served.joined.partitions == []


async def test_an_owner_that_is_gone_is_named(served: Served) -> None:
    await served.service.stop()
    host, port = served.address.address
    with pytest.raises(WriteFailed, match=f"from the sink's owner at {host}:{port}.*Is the owner alive"):
        await RemoteClaims(served.address, 10.0).take(claimant(), ZERO, keeps=False)
