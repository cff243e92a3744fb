"""A partition on each kind of disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from storage_cases import TOPIC_ID

from semel.disk import Disk, OsDisk
from semel.storage.memory import MemoryDisk
from semel.storage.partition import PartitionStore
from semel.storage.settings import StorageSettings
from semel.storage.store import Store


@pytest.fixture(params=["memory", "os"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return MemoryDisk() if request.param == "memory" else OsDisk()


@pytest.fixture
def store(disk: Disk, tmp_path: Path) -> Store:
    return Store(disk, tmp_path / "segments", StorageSettings())


@pytest.fixture
def partition(store: Store) -> PartitionStore:
    return store.partition(TOPIC_ID, 0)
