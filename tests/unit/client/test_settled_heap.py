"""What collections of garbage look through no more."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc

gc.freeze()
assert gc.get_freeze_count() > 0, "some is frozen at the start, as in Python 3.12.1"

import asyncio
from semel.client.settled_heap import settle

before = len(gc.get_objects())
settle()
settled = gc.get_freeze_count()
assert len(gc.get_objects()) < before / 10, (len(gc.get_objects()), before)

class Cycle:
    def __init__(self):
        self.itself = self

Cycle()
settle()
assert gc.get_freeze_count() == settled, "what came later is garbage like any other"
assert gc.collect() > 0
"""


def test_what_is_there_is_kept_once_and_what_comes_later_is_collected() -> None:
    """In a process of its own: this one goes on to collect."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
