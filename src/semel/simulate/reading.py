"""Reading a simulated broker as consumers do: the broker's own fetch, and a reader's own judgement of it."""

from __future__ import annotations

from typing import Final

from semel.server.fetch import READ_COMMITTED, Reading
from semel.server.fetch_sessions import Asked
from semel.server.life import Life
from semel.storage.segment import Region
from semel.verify.ledger import Content, Ends, Ledger, Place, Violation, name
from semel.wire.batch import iter_batches
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import AbortedTransaction, FetchPartition, FetchRequest
from semel.wire.records import read_end_marker, read_records

PAGE_BYTES: Final = 600
"""Small, so that pages end within batches and transactions."""
_NO_TOPIC_ID: Final = bytes(16)


class Page:
    """What one fetch gave."""

    __slots__ = ("ends", "next_offset", "records")

    def __init__(self, ends: Ends, next_offset: int, records: list[tuple[int, bytes]]) -> None:
        self.ends = ends
        self.next_offset = next_offset
        self.records = records


def read_page(life: Life, place: Place, offset: int, *, committed: bool, max_bytes: int = PAGE_BYTES) -> Page:
    """Fetch once, from `offset` or from the start of the log if that has moved past it."""
    partition = life.broker.catalog.partition(*place)
    if partition is None:
        raise Violation(f"{name(place)} is not there")
    offset = max(offset, partition.log.shown_start_offset)
    request = FetchRequest(isolation_level=READ_COMMITTED if committed else 0, max_bytes=max_bytes)
    reading = Reading(life, request, max_bytes, by_id=False)
    wanted = FetchPartition(partition=place[1], fetch_offset=offset, partition_max_bytes=max_bytes)
    reading.read(Asked((place[0], _NO_TOPIC_ID), wanted))
    answer = reading.answers[0][1]
    if answer.error_code:
        raise Violation(f"{name(place)} at {offset}: {ErrorCode(answer.error_code).name}")
    ends = Ends(answer.log_start_offset, answer.last_stable_offset, answer.high_watermark)
    stored = answer.records.load() if isinstance(answer.records, Region) else b""
    next_offset, records = _records(stored, offset, answer.aborted_transactions if committed else None)
    limit = ends.stable if committed else ends.high
    if next_offset == offset < limit:
        raise Violation(f"a reader of {name(place)} is stuck at {offset}, below the end {limit}")
    return Page(ends, next_offset, records)


def _records(
    stored: bytes, offset: int, aborted: list[AbortedTransaction] | None
) -> tuple[int, list[tuple[int, bytes]]]:
    """The records that a reader hands to its user, and where it goes on."""
    waiting = sorted(((item.first_offset, item.producer_id) for item in aborted or ()), reverse=True)
    skipped: set[int] = set()
    records: list[tuple[int, bytes]] = []
    for header, batch in iter_batches(stored):
        while waiting and waiting[-1][0] <= header.last_offset:
            skipped.add(waiting.pop()[1])
        if header.is_control:
            marker = read_end_marker(batch)
            if marker is not None and not marker.commit:
                skipped.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in skipped):
            for record in read_records(batch):
                if record.offset >= offset:
                    records.append((record.offset, record.value or b""))
        offset = max(offset, header.last_offset + 1)
    return offset, records


def read_whole(life: Life, place: Place) -> Content:
    """Everything in a partition, as both kinds of readers see it."""
    first = read_page(life, place, 0, committed=True)
    content = Content(first.ends)
    for committed, found in ((True, content.committed), (False, content.stored)):
        limit = first.ends.stable if committed else first.ends.high
        offset = first.ends.start
        while offset < limit:
            page = read_page(life, place, offset, committed=committed, max_bytes=4 * PAGE_BYTES)
            found.update(page.records)
            offset = page.next_offset
    return content


def offsets_of_groups(life: Life, places: list[Place]) -> dict[tuple[str, Place], int]:
    """The committed offsets of all groups."""
    offsets: dict[tuple[str, Place], int] = {}
    for group in life.broker.groups:
        for place in places:
            topic = life.broker.catalog.by_name.get(place[0])
            known = None if topic is None else group.offsets.get(topic.topic_id, place[1])
            if known is not None:
                offsets[group.group_id, place] = known.offset
    return offsets


def check_life(life: Life, ledger: Ledger, places: list[Place], *, at_rest: bool = False) -> None:
    """Hold everything that a broker has to show against the facts."""
    contents = {place: read_whole(life, place) for place in places}
    check = ledger.check_end if at_rest else ledger.check
    check(contents, offsets_of_groups(life, places))


class Reader:
    """A consumer that goes through one partition, page by page."""

    __slots__ = ("_committed", "_offset", "place")

    def __init__(self, place: Place, *, committed: bool) -> None:
        self.place = place
        self._committed = committed
        self._offset = 0

    def read(self, life: Life, ledger: Ledger) -> None:
        page = read_page(life, self.place, self._offset, committed=self._committed)
        ledger.told_ends(self.place, page.ends)
        for offset, value in page.records:
            if self._committed:
                ledger.saw(self.place, offset, value)
            else:
                ledger.stored_at(self.place, offset, value)
        self._offset = max(self._offset, page.next_offset)
