"""`semel stages`: run the stages of a Python module."""

import asyncio
import logging
import signal
import sys
from importlib import import_module
from pathlib import Path

import click

from semel.cli.options import bootstrap_option
from semel.errors import ConfigError
from semel.subscriptions.stages import Stage, run_stages, stages_of


@click.group
def command() -> None:
    """Run stages: functions between topics."""


@command.command
@click.argument("module_name", metavar="MODULE")
@click.option("--only", "names", multiple=True, metavar="STAGE", help="Only these stages. May be repeated.")
@bootstrap_option
def run(module_name: str, names: tuple[str, ...], bootstrap: str) -> None:
    """Run the stages of MODULE, as `import` finds it here, until told to stop (SIGTERM, or Ctrl-C)."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    stages = _load(module_name)
    if names:
        unknown = sorted(set(names) - {each.name for each in stages})
        if unknown:
            raise ConfigError(f"{module_name} has no stage {unknown[0]!r}: it has {_names(stages)}")
        stages = [each for each in stages if each.name in names]
    for each in stages:
        target = f" -> {each.to}" if each.to else ""
        click.echo(f"{each.name}: {', '.join(each.topics)}{target} (group {each.group})", err=True)
    asyncio.run(_run_until_told(bootstrap, stages))


async def _run_until_told(bootstrap: str, stages: list[Stage]) -> None:
    """Stops cleanly: a process that is just gone is taken for one that a record has killed."""
    running = asyncio.create_task(run_stages(bootstrap, stages))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


def _load(module_name: str) -> list[Stage]:
    # As `python -m` does it: modules of the working directory are found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot run the stages of {module_name!r}: {error}") from error
    stages = stages_of(module)
    if not stages:
        raise ConfigError(f"{module_name} has no stages: decorate a function with @semel.stage(...)")
    return stages


def _names(stages: list[Stage]) -> str:
    return ", ".join(each.name for each in stages)
