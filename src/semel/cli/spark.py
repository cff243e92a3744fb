"""`semel spark`: is everything there that pipelines on Spark need?"""

from dataclasses import asdict
from pathlib import Path

import click

from semel.cli.root import FAILED
from semel.cli.tables import output_option, print_json, print_table
from semel.spark.doctor import Check, examine, is_well


@click.group
def command() -> None:
    """Look after Spark on this machine."""


@command.command
@click.option(
    "--jars",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with jars that pipelines are given; may be repeated.",
)
@click.option("--start", is_flag=True, help="Start Spark, too, and run a task in Python on it.")
@output_option
def doctor(jars: tuple[Path, ...], start: bool, output: str) -> None:
    """Check Java, PySpark, its packages and the Kafka connector; say what is missing and how to get it.

    The exit code is 1 where something that pipelines need is missing.
    """
    checks = examine(jars)
    if start and is_well(checks):
        checks.append(_start())
    if output == "json":
        print_json({"ok": is_well(checks), "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    if not is_well(checks):
        raise click.exceptions.Exit(FAILED)


def _print(checks: list[Check]) -> None:
    print_table(("CHECK", "STATE", "FOUND"), [(check.name, check.state, check.found) for check in checks])
    advice = [check for check in checks if check.advice]
    if advice:
        click.echo()
    for check in advice:
        click.echo(f"{check.name}: {check.advice}")


def _start() -> Check:
    """Whether a session comes up and its workers run Python."""
    from semel.spark.session import local_session

    try:
        spark = local_session("doctor", master="local[1]", log_level="OFF")
        try:
            total = spark.sparkContext.parallelize([20, 22], 1).sum()
        finally:
            spark.stop()
    except Exception as error:  # Whatever Spark throws, the doctor is there to report it.
        first_line = str(error).strip().partition("\n")[0]
        return Check("session", "missing", "does not start", first_line or type(error).__name__)
    return Check("session", "ok" if total == 42 else "missing", "started and ran a task in Python")
