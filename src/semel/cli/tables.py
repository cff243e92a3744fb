"""Tables for people and JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import click

# Output that goes to a file or a pipe is never cut to the width of a screen.
UNLIMITED_WIDTH: Final = 100_000

output_option = click.option(
    "--output",
    "-o",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Text for people, JSON for programs.",
)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    # Imported here because it takes a tenth of a second, and JSON does without.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
    Console(width=width, highlight=False).print(table)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ",".join(str(part) for part in value) or "-"
    return str(value)
