"""Semel: exactly-once for stream pipelines."""

from semel.version import __version__

__all__ = ["__version__"]
