"""What mypyc must be told of our classes, and whether it has compiled them.

The same source runs with and without it: `script/compile`, docs/decisions/0007.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["is_compiled", "mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_attributes):
        """In place of mypy_extensions, which no user of ours needs: it says something to mypyc alone."""
        return lambda decorated: decorated


def is_compiled() -> bool:
    """Whether the hot path runs compiled."""
    core = find_spec("semel.broker.core")
    return core is not None and not str(core.origin).endswith(".py")
