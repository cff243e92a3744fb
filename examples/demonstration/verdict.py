"""What came out, held against what was committed: each order once, with its price, and no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# The id of an order, and its price.
Row = tuple[str, int]


@dataclass(slots=True, frozen=True)
class Verdict:
    """How many orders came out, and how many of them wrongly, in every way that there is."""

    out: int
    lost: int
    duplicated: int
    uncommitted: int
    wrong: int

    @property
    def is_exactly_once(self) -> bool:
        return not (self.lost or self.duplicated or self.uncommitted or self.wrong)


def compare(committed: dict[str, int], rows: list[Row]) -> Verdict:
    times = Counter(order_id for order_id, _ in rows)
    return Verdict(
        out=len(rows),
        lost=sum(1 for order_id in committed if order_id not in times),
        duplicated=sum(count - 1 for count in times.values()),
        uncommitted=sum(1 for order_id in times if order_id not in committed),
        wrong=sum(1 for order_id, cents in rows if committed.get(order_id, cents) != cents),
    )
