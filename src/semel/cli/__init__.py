"""The command line: `semel` and everything below it."""

from semel.cli.root import main

__all__ = ["main"]
