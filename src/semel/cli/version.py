"""`semel version`."""

import click

from semel.version import __version__


@click.command
def command() -> None:
    """Print the version."""
    click.echo(f"semel {__version__}")
