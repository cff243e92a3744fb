"""`semel version`."""

import click

from semel.cli.tables import output_option, print_json
from semel.version import __version__


@click.command
@output_option
def command(output: str) -> None:
    """Print the version."""
    if output == "json":
        print_json({"version": __version__})
        return
    click.echo(f"semel {__version__}")
