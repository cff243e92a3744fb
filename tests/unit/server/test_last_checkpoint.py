"""A broker that stops in the midst of a flush: a flush that was cut off is no flush."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from node_cases import TOPIC, WAIT_S, Client, ObedientDisk, start_node

from semel.disk import Disk
from semel.server.checkpoint import Checkpointer
from semel.server.node import Node
from semel.simulate.reading import read_whole

VALUES = {offset: b"value %d" % offset for offset in range(5)}


async def node_in_a_flush(directory: Path, disk: ObedientDisk) -> Node:
    """A node with records, whose checkpointer waits for the disk to flush them."""
    disk.may_flush.clear()
    node = await start_node(directory, disk, flush_interval_bytes="1")
    client = Client(node)
    await client.create_topic()
    for value in VALUES.values():
        assert await client.produce(value) == 0
    assert await asyncio.to_thread(disk.is_flushing.wait, WAIT_S), "no flush began"
    return node


async def test_a_stop_waits_for_the_flush_that_is_under_way(tmp_path: Path) -> None:
    disk = ObedientDisk()
    node = await node_in_a_flush(tmp_path, disk)
    stopping = asyncio.create_task(node.stop())
    # It has begun to stop, and every task that it could have cancelled has been.
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    disk.may_flush.set()
    await stopping
    again = await start_node(tmp_path, disk)
    assert read_whole(again.life, (TOPIC, 0)).stored == VALUES
    assert not again.life.dirty, "what the flush brought to disk does not count as flushed"
    await again.stop()


async def test_a_flush_that_nobody_finished_lets_go_of_no_journal(tmp_path: Path) -> None:
    disk = ObedientDisk()
    node = await node_in_a_flush(tmp_path, disk)
    running = node._checkpointing
    assert running is not None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    disk.may_flush.set()
    # Another one comes across the partition whose flush was cut off.
    successor = Checkpointer(node.life, cast("Disk", disk), node.layout, node.settings, node.in_worker)
    await successor.flush()
    await successor.snapshot()
    await node.stop()
    again = await start_node(tmp_path, disk)
    assert read_whole(again.life, (TOPIC, 0)).stored == VALUES
    await again.stop()
