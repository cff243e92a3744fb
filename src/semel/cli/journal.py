"""`semel journal`: look at the files of a stopped broker, and cut damage out on purpose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from semel.cli.root import FAILED
from semel.cli.tables import output_option, print_json, print_table
from semel.disk import OsDisk
from semel.errors import ConfigError
from semel.journal.check import Repair, Report
from semel.journal.check import check as check_journal
from semel.journal.check import repair as repair_journal
from semel.server.recovery import Layout

SALT_BYTES: Final = 8

directory_argument = click.argument(
    "directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.group
def command() -> None:
    """Check and repair the files of a stopped broker.

    DIR is the broker's data directory, as given to `semel serve --data`.
    """


@command.command
@directory_argument
@output_option
def check(directory: Path, output: str) -> None:
    """Read everything in DIR's journal and say whether a start would succeed; change nothing.

    An unfinished write at the end is normal after a crash, and no loss. The exit code is 1 where durable
    bytes are damaged.
    """
    disk = OsDisk()
    with _locked(disk, directory) as layout:
        report = check_journal(disk, layout.journal, snapshots=layout.snapshots)
    if output == "json":
        print_json(_report_json(report))
    else:
        _print_report(report)
    if not report.ok:
        raise click.exceptions.Exit(FAILED)


@command.command
@directory_argument
@click.option("--accept-loss", is_flag=True, help="Give up every write at or beyond the damage.")
@output_option
def repair(directory: Path, accept_loss: bool, output: str) -> None:
    """Cut DIR's journal at its first damage, so that the broker can start again.

    Everything before the damage is kept. Everything behind it is lost, acknowledged writes too: restoring
    a backup is better where there is one.
    """
    disk = OsDisk()
    with _locked(disk, directory) as layout:
        done = repair_journal(
            disk,
            layout.journal,
            snapshots=layout.snapshots,
            accept_loss=accept_loss,
            salt=int.from_bytes(os.urandom(SALT_BYTES)),
        )
    if output == "json":
        print_json(_repair_json(done))
    else:
        _print_repair(done)


def _print_repair(done: Repair | None) -> None:
    if done is None:
        click.echo("nothing to repair")
        return
    click.echo(f"cut at position {done.cut_at}; the journal goes on in generation {done.generation}")
    for path in done.removed_snapshots:
        click.echo(f"removed {path}, which reached beyond the cut")


@contextmanager
def _locked(disk: OsDisk, directory: Path) -> Iterator[Layout]:
    """The layout of a data directory that no broker uses meanwhile."""
    layout = Layout(directory)
    if not disk.exists(layout.journal):
        raise ConfigError(f"{directory} is no data directory of a broker: there is no journal in it")
    lock = disk.lock(layout.lock)
    try:
        yield layout
    finally:
        lock.release()


def _print_report(report: Report) -> None:
    print_table(
        ("FILE", "GENERATION", "BASE", "END", "GROUPS", "BYTES", "STATE"),
        [
            (file.path.name, file.generation, file.base, file.end, file.groups, file.size_bytes, state)
            for file in report.files
            for state in ("void" if file.void else file.problem or "whole",)
        ],
    )
    if report.snapshots:
        click.echo()
        print_table(
            ("SNAPSHOT", "PARTS", "HORIZON", "REACHES", "STATE"),
            [
                (each.path.name, each.parts, each.horizon, each.highest_stamp, each.problem or "whole")
                for each in report.snapshots
            ],
        )
    click.echo()
    if report.corrupt_at is not None:
        click.echo(f"corrupt at position {report.corrupt_at}: a broker will not start on this")
    elif report.torn is not None:
        click.echo(f"ends at position {report.end}, with an unfinished write behind it that a start will cut")
    else:
        click.echo(f"ends at position {report.end}")


def _repair_json(done: Repair | None) -> dict[str, object]:
    return {
        "repaired": done is not None,
        "cut_at": None if done is None else done.cut_at,
        "generation": None if done is None else done.generation,
        "removed_snapshots": [] if done is None else [path.name for path in done.removed_snapshots],
    }


def _report_json(report: Report) -> dict[str, object]:
    return {
        "ok": report.ok,
        "generation": report.generation,
        "start": report.start,
        "end": report.end,
        "corrupt_at": report.corrupt_at,
        "torn_at": None if report.torn is None else report.torn.position,
        "files": [
            {
                "file": file.path.name,
                "generation": file.generation,
                "base": file.base,
                "end": file.end,
                "groups": file.groups,
                "size_bytes": file.size_bytes,
                "void": file.void,
                "problem": file.problem,
            }
            for file in report.files
        ],
        "snapshots": [
            {
                "file": each.path.name,
                "parts": each.parts,
                "horizon": each.horizon,
                "highest_stamp": each.highest_stamp,
                "problem": each.problem,
            }
            for each in report.snapshots
        ],
    }
