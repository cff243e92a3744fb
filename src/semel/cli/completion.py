"""`semel completion`: scripts that teach a shell our commands."""

import click
from click.shell_completion import get_completion_class

from semel.errors import ConfigError


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL; topic names are completed too.

    \b
    bash: eval "$(semel completion bash)"             in ~/.bashrc
    zsh:  eval "$(semel completion zsh)"              in ~/.zshrc
    fish: semel completion fish | source              in ~/.config/fish/config.fish
    """
    completion = get_completion_class(shell)
    if completion is None:
        raise ConfigError(f"{shell} cannot be completed")
    root = ctx.find_root().command
    click.echo(completion(root, {}, "semel", "_SEMEL_COMPLETE").source())
