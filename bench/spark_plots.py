"""Draws what `bench/spark.py`, `spark_sql.py` and `spark_reader.py` have measured, for docs/spark.md.

    .venv/bin/python bench/spark.py --rounds 3 --only "^(Spark's own.*|exactly_once(, keys)?)$"
        --json bench/results/spark.json
    .venv/bin/python bench/spark.py --brokers semel --small-batches 1000 --rounds 1 --warm-rounds 0
        --only "^(Spark's own, at-least-once|exactly_once, Spark's source|exactly_once)$"
        --json bench/results/spark_small.json
    .venv/bin/python bench/spark_sql.py --json bench/results/spark_postgres.json
    .venv/bin/python bench/spark_sql.py --database mariadb --rows 1000000
        --json bench/results/spark_mariadb.json
    .venv/bin/python bench/spark_reader.py --json bench/results/spark_reader.json
    .venv/bin/python bench/spark_plots.py

Bars are medians, thin lines go from the least to the most. What was not measured is not drawn.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"
PLOTS: Final = HERE.parent / "docs" / "plots"

WIDTH: Final = 760
LABEL_WIDTH: Final = 270
BAR_HEIGHT: Final = 18
ROW_HEIGHT: Final = 24
TITLE_HEIGHT: Final = 34
OURS, OTHERS, INK = "#2563eb", "#9ca3af", "#1f2937"


class Bar(NamedTuple):
    """One way, with what it took in every round."""

    label: str
    values: list[float]
    is_ours: bool


def draw(title: str, bars: list[Bar]) -> str:
    """An SVG with a bar for each."""
    most = max(max(bar.values) for bar in bars)
    room = WIDTH - LABEL_WIDTH - 80
    height = TITLE_HEIGHT + ROW_HEIGHT * len(bars) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for place, bar in enumerate(bars):
        top = TITLE_HEIGHT + place * ROW_HEIGHT
        middle = top + BAR_HEIGHT / 2
        median = statistics.median(bar.values)
        start, stop = (LABEL_WIDTH + each / most * room for each in (min(bar.values), max(bar.values)))
        parts += [
            f'<text x="{LABEL_WIDTH - 8}" y="{middle + 4}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{median / most * room:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{OURS if bar.is_ours else OTHERS}"/>',
            f'<line x1="{start:.1f}" x2="{stop:.1f}" y1="{middle}" y2="{middle}" stroke="{INK}"/>',
            f'<text x="{stop + 8:.1f}" y="{middle + 4}">{median:,.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def is_ours(way: str) -> bool:
    return way.startswith("exactly_once")


def measured(name: str) -> Any:
    """What a run wrote; None where there was none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def topic_to_topic(found: Any) -> list[Bar]:
    return [
        Bar(
            f"{way} ({broker})",
            [found["records"] / each["elapsed_s"] / 1000 for each in rounds],
            is_ours(way),
        )
        for broker, ways in found["brokers"].items()
        for way, rounds in ways.items()
    ]


def middle_of(values: list[float]) -> list[float]:
    """Without the twentieth at either end."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return ordered[cut : len(ordered) - cut]


def small_batches(found: Any) -> list[Bar]:
    return [
        Bar(f"{way} ({broker})", middle_of([ms for each in rounds for ms in each["batch_ms"]]), is_ours(way))
        for broker, ways in found["brokers"].items()
        for way, rounds in ways.items()
    ]


READERS: Final = {"python": "semel.spark.read", "jvm": "Spark's own source"}


def readers(found: Any) -> list[Bar]:
    bars = []
    for way, rounds in found["ways"].items():
        kind, connector = way.split(", ")
        rates = [found["records"] / each["elapsed_s"] / 1000 for each in rounds]
        bars.append(Bar(f"{READERS[connector]} ({kind})", rates, connector == "python"))
    return bars


def into_a_table(found: Any) -> list[Bar]:
    return [
        Bar(way, [found["rows"] / each["elapsed_s"] / 1000 for each in rounds], is_ours(way))
        for way, rounds in found["ways"].items()
    ]


PLOTTED: Final = (
    ("spark", "Topic to topic: thousand records a second", topic_to_topic),
    ("spark_small", "A small batch: milliseconds, from the 5th to the 95th percentile", small_batches),
    ("spark_postgres", "PostgreSQL: thousand rows a second", into_a_table),
    ("spark_mariadb", "MariaDB: thousand rows a second", into_a_table),
    ("spark_reader", "Reading a topic: thousand records a second", readers),
)


def main() -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, title, bars in PLOTTED:
        if (found := measured(name)) is not None:
            (PLOTS / f"{name}.svg").write_text(draw(title, bars(found)))


if __name__ == "__main__":
    main()
