"""The catalog: which topics there are, their ids, partitions and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from semel.broker.configs import TopicSettings
from semel.log.partition import PartitionLog

MAX_NAME_CHARACTERS: Final = 249
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
INTERNAL_NAMES: Final = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})
"""Where Kafka keeps groups and transactions. Ours are in the journal: these are shown to tools, and empty."""
# Clients treat these names specially, so nobody may have them.
RESERVED_NAMES: Final = INTERNAL_NAMES | {"__share_group_state", "__cluster_metadata"}


def refuses_name(name: str) -> str | None:
    """Why a topic cannot have this name, or None if it can."""
    if not name:
        return "the empty string is not allowed"
    if name in (".", ".."):
        return f"'{name}' is not allowed"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"the length of a name must not be above {MAX_NAME_CHARACTERS} characters"
    if not _LEGAL_NAME.fullmatch(name):
        return f"'{name}' contains characters other than ASCII letters, digits, '.', '_' and '-'"
    if name in RESERVED_NAMES:
        return f"'{name}' is a name of Kafka's own and reserved"
    return None


class Partition:
    """One partition of a topic: where it belongs, and its log."""

    __slots__ = ("index", "log", "stamp", "topic")

    def __init__(self, topic: Topic, index: int) -> None:
        self.topic = topic
        self.index = index
        self.log = PartitionLog()
        self.stamp = 0
        """The journal position that a loaded snapshot covers: entries below it are not applied again."""

    def __repr__(self) -> str:
        return f"Partition({self.topic.name}-{self.index})"


class Topic:
    """A topic under its name and id. The id tells it from an earlier topic of the same name."""

    __slots__ = ("configs", "is_internal", "name", "partitions", "settings", "topic_id")

    def __init__(self, name: str, topic_id: bytes, configs: dict[str, str], settings: TopicSettings) -> None:
        self.name = name
        self.is_internal = name in INTERNAL_NAMES
        self.topic_id = topic_id
        self.configs = configs
        self.settings = settings
        self.partitions: list[Partition] = []

    def grow(self, count: int) -> None:
        """Add partitions up to `count`; never fewer than there are."""
        for index in range(len(self.partitions), count):
            self.partitions.append(Partition(self, index))

    def partition(self, index: int) -> Partition | None:
        return self.partitions[index] if 0 <= index < len(self.partitions) else None


class Catalog:
    """All topics, by name and by id."""

    __slots__ = ("by_id", "by_name", "defaults", "version")

    def __init__(self, defaults: Mapping[str, str]) -> None:
        self.defaults = defaults
        """The broker's values for topic settings that a topic leaves open."""
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[bytes, Topic] = {}
        self.version = 0
        """Raised when topics come, go or grow: who looked at this version need not look again."""

    def __iter__(self) -> Iterator[Topic]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def partition(self, name: str, index: int) -> Partition | None:
        topic = self.by_name.get(name)
        return None if topic is None else topic.partition(index)

    def partition_by_id(self, topic_id: bytes, index: int) -> Partition | None:
        topic = self.by_id.get(topic_id)
        return None if topic is None else topic.partition(index)

    def partition_count(self) -> int:
        return sum(len(topic.partitions) for topic in self)

    def create(self, name: str, topic_id: bytes, partitions: int, configs: dict[str, str]) -> Topic:
        topic = Topic(name, topic_id, configs, TopicSettings.of(configs, self.defaults))
        topic.grow(partitions)
        self.by_name[name] = topic
        self.by_id[topic_id] = topic
        self.version += 1
        return topic

    def grow(self, topic_id: bytes, count: int) -> None:
        self.by_id[topic_id].grow(count)
        self.version += 1

    def delete(self, topic_id: bytes) -> Topic | None:
        topic = self.by_id.pop(topic_id, None)
        if topic is not None:
            del self.by_name[topic.name]
            self.version += 1
        return topic

    def configure(self, topic_id: bytes, configs: dict[str, str]) -> None:
        topic = self.by_id[topic_id]
        topic.configs = configs
        topic.settings = TopicSettings.of(configs, self.defaults)
