"""The heap of a process that does one small task after the other, as Spark's Python workers do."""

import gc
from functools import cache


@cache
def settle() -> None:
    """Keeps what is there by now out of all collections of garbage to come. Once a process.

    A worker of Spark collects after every task, through all that its modules hold: 40 ms of CPU.
    """
    # That it has run is not asked of gc.get_freeze_count(): Python 3.12.1 begins with some hundred objects.
    gc.freeze()
