"""`semel config`: the broker's settings."""

import os
from pathlib import Path

import click

from semel.cli.settings import config_option, load_settings, set_option
from semel.cli.tables import output_option, print_json, print_table
from semel.server.settings import SETTINGS


@click.group
def command() -> None:
    """Show the broker's settings and where each comes from."""


@command.command
@click.option("--changed", is_flag=True, help="Only those that differ from their defaults.")
@set_option
@config_option
@output_option
def show(changed: bool, assignments: tuple[str, ...], config: Path | None, output: str) -> None:
    """Show what `semel serve` would run with, given the same flags, environment and file."""
    settings = load_settings(config, os.environ, assignments, {})
    rows = [
        (name, settings.value(name).text, settings.value(name).source, definition.summary)
        for name, definition in sorted(SETTINGS.items())
        if not changed or settings.value(name).source != "default"
    ]
    if output == "json":
        fields = ("name", "value", "source", "summary")
        print_json([dict(zip(fields, row, strict=True)) for row in rows])
    else:
        print_table(("SETTING", "VALUE", "SOURCE", "MEANING"), rows)
