"""Draws what `bench/spark.py`, `spark_sql.py` and `spark_reader.py` have measured, for docs/spark.md.

    .venv/bin/python bench/spark.py --only "^(Spark's own.*|exactly_once(, keys)?)$"
        --json bench/results/spark.json
    .venv/bin/python bench/spark.py --brokers semel --small-batches 1000 --rounds 1 --warm-rounds 0
        --only "^(Spark's own, at-least-once|exactly_once, Spark's source|exactly_once)$"
        --json bench/results/spark_small.json
    .venv/bin/python bench/spark_sql.py --json bench/results/spark_postgres.json
    .venv/bin/python bench/spark_sql.py --database mariadb --rows 1000000
        --json bench/results/spark_mariadb.json
    .venv/bin/python bench/spark_reader.py --json bench/results/spark_reader.json
    .venv/bin/python bench/spark_plots.py

Bars are medians, thin lines go from the least to the most; a course is smoothed by a running median. What was
not measured is not drawn.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from itertools import cycle
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
COURSE_HEIGHT: Final = 260
# Of so many batches, one after the other, a course shows the median.
SMOOTHED: Final = 25
OURS, OTHERS, INK = "#2563eb", "#9ca3af", "#1f2937"
COURSES: Final = (OTHERS, "#93c5fd", OURS)


class Bar(NamedTuple):
    """One way, with what it took in every round."""

    label: str
    values: list[float]
    is_ours: bool


def draw(title: str, bars: list[Bar]) -> str:
    """An SVG with a bar for each."""
    most = max(max(bar.values) for bar in bars)
    room = WIDTH - LABEL_WIDTH - 80
    parts = []
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
    return picture(title, TITLE_HEIGHT + ROW_HEIGHT * len(bars) + 8, parts)


def draw_course(title: str, bars: list[Bar]) -> str:
    """An SVG with a line for each: its values as they came, one after the other."""
    most = 1.1 * max(max(smoothed(bar.values)) for bar in bars)
    room, bottom = WIDTH - LABEL_WIDTH - 60, COURSE_HEIGHT - 24
    parts = [
        f'<path d="M40 {TITLE_HEIGHT} V{bottom} H{40 + room}" fill="none" stroke="{INK}"/>',
        f'<text x="36" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="36" y="{TITLE_HEIGHT + 10}" text-anchor="end">{most:,.0f}</text>',
    ]
    for bar, colour in zip(bars, cycle(COURSES), strict=False):  # the colours have no end
        course = smoothed(bar.values)
        points = " ".join(
            f"{40 + place / len(course) * room:.1f},{bottom - ms / most * (bottom - TITLE_HEIGHT):.1f}"
            for place, ms in enumerate(course)
        )
        last = float(points.rpartition(",")[2])
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{48 + room}" y="{last + 4:.1f}">{escape(bar.label)}</text>',
        ]
    count = max(len(bar.values) for bar in bars)
    parts.append(f'<text x="{40 + room}" y="{bottom + 16}" text-anchor="end">batch {count:,}</text>')
    return picture(title, COURSE_HEIGHT, parts)


def picture(title: str, height: int, parts: list[str]) -> str:
    """The parts as an SVG, under a title."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def smoothed(values: list[float]) -> list[float]:
    """The median of each value and of some before it."""
    return [
        statistics.median(values[max(end - SMOOTHED, 0) : end]) for end in range(SMOOTHED, len(values) + 1)
    ]


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
    return [Bar(each.label, middle_of(each.values), each.is_ours) for each in batch_by_batch(found)]


def batch_by_batch(found: Any) -> list[Bar]:
    return [
        Bar(f"{way} ({broker})", [ms for each in rounds for ms in each["batch_ms"]], is_ours(way))
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
    if (found := measured("spark_small")) is not None:
        title = "Small batches, one after the other: milliseconds"
        (PLOTS / "spark_small_course.svg").write_text(draw_course(title, batch_by_batch(found)))


if __name__ == "__main__":
    main()
