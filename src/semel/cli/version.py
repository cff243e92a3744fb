"""`semel version`."""

import click

from semel.cli.tables import output_option, print_json
from semel.compilation import is_compiled
from semel.version import __version__


@click.command
@output_option
def command(output: str) -> None:
    """Print the version, and whether the hot path is compiled (docs/decisions/0007)."""
    if output == "json":
        print_json({"version": __version__, "compiled": is_compiled()})
        return
    click.echo(f"semel {__version__}" + (" (compiled)" if is_compiled() else ""))
