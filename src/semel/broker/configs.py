"""The settings of a topic: their names (Kafka's), types, defaults and limits, and the typed form the broker
works with.

A topic stores only what its owner set. What is not set comes from the broker's own settings, under the name
that Kafka gives the default (`log.retention.ms` for `retention.ms`), and last from the default here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from semel.errors import ConfigError
from semel.log.settings import LogSettings
from semel.wire.compression import Codec

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1


class ConfigType(IntEnum):
    """The types of a setting, as DescribeConfigs numbers them."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


@dataclass(slots=True, frozen=True)
class ConfigDefinition:
    """One setting: what values it takes and what it is when nobody says."""

    name: str
    kind: ConfigType
    default: str
    server_name: str
    summary: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: str) -> None:
        """Raise ConfigError, saying why, if `value` cannot be the value of this setting."""
        reason = self._why_not(value)
        if reason is not None:
            raise ConfigError(f"Invalid value {value!r} for configuration {self.name}: {reason}")

    def _why_not(self, value: str) -> str | None:
        match self.kind:
            case ConfigType.BOOLEAN:
                return None if value.lower() in ("true", "false") else "it must be true or false"
            case ConfigType.INT | ConfigType.LONG | ConfigType.DOUBLE:
                return self._why_not_number(value)
            case ConfigType.STRING | ConfigType.LIST:
                return self._why_not_choice(value)

    def _why_not_number(self, value: str) -> str | None:
        try:
            number = float(value) if self.kind == ConfigType.DOUBLE else int(value)
        except ValueError:
            return f"it must be a number of type {self.kind.name.lower()}"
        if self.minimum is not None and number < self.minimum:
            return f"it must be at least {self.minimum:g}"
        limit = (
            self.maximum
            if self.maximum is not None
            else (INT_MAX if self.kind == ConfigType.INT else LONG_MAX)
        )
        if not number <= limit:
            return f"it must be at most {limit:g}"
        return None

    def _why_not_choice(self, value: str) -> str | None:
        if not self.choices:
            return None
        words = [word.strip() for word in value.split(",")] if self.kind == ConfigType.LIST else [value]
        if all(word in self.choices for word in words):
            return None
        return f"it must be one of {', '.join(self.choices)}"


_B, _S, _I, _L, _D, _W = (
    ConfigType.BOOLEAN,
    ConfigType.STRING,
    ConfigType.INT,
    ConfigType.LONG,
    ConfigType.DOUBLE,
    ConfigType.LIST,
)

AS_PRODUCED: Final = "producer"
CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}

_TOPIC_CONFIGS: Final = (
    ConfigDefinition(
        "cleanup.policy", _W, "delete", "log.cleanup.policy",
        "delete old segments, compact by key, or both", choices=("delete", "compact"),
    ),
    ConfigDefinition(
        "compression.type", _S, "producer", "compression.type",
        "how batches are kept; producer: as they came, which costs the broker nothing",
        choices=(AS_PRODUCED, *CODECS),
    ),
    ConfigDefinition(
        "delete.retention.ms", _L, "86400000", "log.cleaner.delete.retention.ms",
        "how long compaction keeps tombstones and markers", minimum=0,
    ),
    ConfigDefinition(
        "index.interval.bytes", _I, "4096", "log.index.interval.bytes",
        "bytes between two entries of a segment's index", minimum=0,
    ),
    ConfigDefinition(
        "max.compaction.lag.ms", _L, str(LONG_MAX), "log.cleaner.max.compaction.lag.ms",
        "how long a record may wait for compaction at most", minimum=1,
    ),
    ConfigDefinition(
        "max.message.bytes", _I, "1048588", "message.max.bytes",
        "the largest record batch that is accepted", minimum=0,
    ),
    ConfigDefinition(
        "message.timestamp.after.max.ms", _L, "3600000", "log.message.timestamp.after.max.ms",
        "how far in the future a record's time may lie", minimum=0,
    ),
    ConfigDefinition(
        "message.timestamp.before.max.ms", _L, str(LONG_MAX), "log.message.timestamp.before.max.ms",
        "how far in the past a record's time may lie", minimum=0,
    ),
    ConfigDefinition(
        "message.timestamp.type", _S, "CreateTime", "log.message.timestamp.type",
        "whose clock stamps a record", choices=("CreateTime", "LogAppendTime"),
    ),
    ConfigDefinition(
        "min.cleanable.dirty.ratio", _D, "0.5", "log.cleaner.min.cleanable.ratio",
        "the share of uncompacted bytes that starts a compaction", minimum=0, maximum=1,
    ),
    ConfigDefinition(
        "min.compaction.lag.ms", _L, "0", "log.cleaner.min.compaction.lag.ms",
        "how long a record stays out of compaction at least", minimum=0,
    ),
    ConfigDefinition(
        "min.insync.replicas", _I, "1", "min.insync.replicas",
        "accepted for compatibility: every acknowledged write is on disk", minimum=1,
    ),
    ConfigDefinition(
        "retention.bytes", _L, "-1", "log.retention.bytes",
        "how many bytes a partition keeps, -1 for no limit", minimum=-1,
    ),
    ConfigDefinition(
        "retention.ms", _L, "604800000", "log.retention.ms",
        "how long a record is kept, -1 for ever", minimum=-1,
    ),
    ConfigDefinition(
        "segment.bytes", _I, "1073741824", "log.segment.bytes",
        "the size at which a segment is closed", minimum=14,
    ),
    ConfigDefinition(
        "segment.ms", _L, "604800000", "log.roll.ms",
        "the age at which a segment is closed", minimum=1,
    ),
)  # fmt: skip

TOPIC_CONFIGS: Final[dict[str, ConfigDefinition]] = {config.name: config for config in _TOPIC_CONFIGS}

# Kafka knows these; they have no meaning here, and a tool that sets them should not fail for it.
ACCEPTED_WITHOUT_EFFECT: Final = frozenset(
    {
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.zstd.level",
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "leader.replication.throttled.replicas",
        "preallocate",
        "segment.index.bytes",
        "segment.jitter.ms",
        "unclean.leader.election.enable",
    }
)


def check_topic_configs(configs: Mapping[str, str]) -> None:
    """Raise ConfigError if a name is unknown or a value does not fit."""
    for name, value in configs.items():
        definition = TOPIC_CONFIGS.get(name)
        if definition is not None:
            definition.check(value)
        elif name not in ACCEPTED_WITHOUT_EFFECT:
            raise ConfigError(f"Unknown topic config name: {name}")


@dataclass(slots=True, frozen=True)
class BrokerSetting:
    """One setting of the broker itself, as DescribeConfigs shows it."""

    name: str
    value: str
    kind: ConfigType
    is_set: bool
    summary: str


@dataclass(slots=True, frozen=True)
class TopicSettings:
    """A topic's settings with every default filled in, ready for use on the hot path."""

    compacted: bool
    codec: Codec | None
    """How batches are kept; None: as they came."""
    max_message_bytes: int
    timestamp_after_max_ms: int
    timestamp_before_max_ms: int
    append_time: bool
    log: LogSettings

    @classmethod
    def of(cls, configs: Mapping[str, str], defaults: Mapping[str, str]) -> TopicSettings:
        """The settings of a topic with these configs, on a broker with these defaults for topics."""

        def value(name: str) -> str:
            found = configs.get(name)
            if found is None:
                found = defaults.get(name)
            return TOPIC_CONFIGS[name].default if found is None else found

        policies = frozenset(word.strip() for word in value("cleanup.policy").split(","))
        return cls(
            compacted="compact" in policies,
            codec=CODECS.get(value("compression.type")),
            max_message_bytes=int(value("max.message.bytes")),
            timestamp_after_max_ms=int(value("message.timestamp.after.max.ms")),
            timestamp_before_max_ms=int(value("message.timestamp.before.max.ms")),
            append_time=value("message.timestamp.type") == "LogAppendTime",
            log=LogSettings(
                segment_bytes=int(value("segment.bytes")),
                segment_ms=int(value("segment.ms")),
                retention_ms=int(value("retention.ms")),
                retention_bytes=int(value("retention.bytes")),
                cleanup_policy=policies,
                delete_retention_ms=int(value("delete.retention.ms")),
                min_cleanable_dirty_ratio=float(value("min.cleanable.dirty.ratio")),
                min_compaction_lag_ms=int(value("min.compaction.lag.ms")),
                max_compaction_lag_ms=int(value("max.compaction.lag.ms")),
                index_interval_bytes=int(value("index.interval.bytes")),
            ),
        )
