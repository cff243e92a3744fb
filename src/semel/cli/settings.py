"""How commands take the broker's settings."""

from collections.abc import Mapping
from pathlib import Path

import click

from semel.cli.options import parse_assignments
from semel.server.settings import Settings

config_option = click.option(
    "--config",
    envvar="SEMEL_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file of NAME=VALUE lines.",
)
set_option = click.option(
    "--set", "-s", "assignments", multiple=True, metavar="NAME=VALUE", help="Any setting; may be repeated."
)


def load_settings(
    config: Path | None,
    environment: Mapping[str, str],
    assignments: tuple[str, ...],
    named: Mapping[str, str | None],
) -> Settings:
    """All settings; an option of its own is stronger than --set."""
    flags = parse_assignments(assignments)
    flags.update({name: value for name, value in named.items() if value is not None})
    return Settings.load(file=config, environment=environment, flags=flags)
