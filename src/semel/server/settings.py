"""The broker's settings: one table, filled from a file, the environment and flags, in that order of strength.

Names are Kafka's where Kafka has the setting: `num.partitions` in the file, `SEMEL_NUM_PARTITIONS` in the
environment, `--set num.partitions=4` as a flag. Each value remembers where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semel.broker.configs import TOPIC_CONFIGS, BrokerSetting, ConfigDefinition, ConfigType
from semel.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "SEMEL_"
# Variables of other parts of Semel, which are no settings of the broker.
FOREIGN_VARIABLES: Final = frozenset({"SEMEL_BOOTSTRAP", "SEMEL_CONFIG", "SEMEL_COMPLETE", "SEMEL_TESTING"})
MIB: Final = 1024 * 1024

_B, _S, _I, _L = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT, ConfigType.LONG

_OWN: Final = (
    ConfigDefinition("log.dirs", _S, "semel-data", "", "the directory of journal, snapshots and segments"),
    ConfigDefinition(
        "listeners", _S, "127.0.0.1:9092", "", "host:port to listen on; port 0 takes a free one"
    ),
    ConfigDefinition(
        "advertised.listeners",
        _S,
        "",
        "",
        "host:port that clients are told; empty: the one listened on, 127.0.0.1 for a wildcard",
    ),
    ConfigDefinition(
        "metrics.listeners", _S, "", "", "host:port to serve Prometheus metrics on; empty for not at all"
    ),
    ConfigDefinition("node.id", _I, "1", "", "the broker's id in metadata", minimum=0),
    ConfigDefinition(
        "durability",
        _S,
        "fsync",
        "",
        "fsync: acknowledged means on disk; os: in the page cache, as Kafka does by default",
        choices=("fsync", "os"),
    ),
    ConfigDefinition("num.partitions", _I, "1", "", "partitions of a topic that does not say", minimum=1),
    ConfigDefinition("auto.create.topics.enable", _B, "true", "", "create a topic when a client asks for it"),
    ConfigDefinition(
        "max.partitions", _I, "20000", "", "partitions that this broker holds at most", minimum=1
    ),
    ConfigDefinition(
        "socket.request.max.bytes", _I, str(100 * MIB), "", "the largest request that is read", minimum=1024
    ),
    ConfigDefinition(
        "queued.max.request.bytes",
        _L,
        str(512 * MIB),
        "",
        "bytes of all requests being read or answered; beyond it connections wait",
        minimum=MIB,
    ),
    ConfigDefinition(
        "max.connections",
        _I,
        "20000",
        "",
        "connections at a time; further ones are closed at once",
        minimum=1,
    ),
    ConfigDefinition(
        "connections.max.idle.ms",
        _L,
        "600000",
        "",
        "close a connection that has been silent for so long",
        minimum=1000,
    ),
    ConfigDefinition(
        "fetch.max.bytes",
        _I,
        str(55 * MIB),
        "",
        "record bytes in one answer to a fetch at most",
        minimum=1024,
    ),
    ConfigDefinition(
        "max.incremental.fetch.session.cache.slots",
        _I,
        "1000",
        "",
        "fetch sessions remembered at a time",
        minimum=0,
    ),
    ConfigDefinition(
        "journal.file.bytes", _I, str(64 * MIB), "", "the size of a journal file, preallocated", minimum=MIB
    ),
    ConfigDefinition(
        "snapshot.interval.bytes",
        _L,
        str(32 * MIB),
        "",
        "journal written between two snapshots of the state",
        minimum=1,
    ),
    ConfigDefinition(
        "flush.interval.bytes",
        _L,
        str(256 * MIB),
        "",
        "journal written between two flushes of the segments",
        minimum=1,
    ),
    ConfigDefinition(
        "storage.min.free.bytes",
        _L,
        str(64 * MIB),
        "",
        "refuse to append when less of the disk than this is free, so that deleting still works",
        minimum=0,
    ),
    ConfigDefinition(
        "log.retention.check.interval.ms",
        _L,
        "300000",
        "",
        "how often old segments are looked for",
        minimum=1,
    ),
    ConfigDefinition(
        "log.cleaner.backoff.ms", _L, "15000", "", "how often partitions to compact are looked for", minimum=1
    ),
    ConfigDefinition(
        "group.min.session.timeout.ms",
        _I,
        "6000",
        "",
        "the shortest session that a group member may ask for",
        minimum=1,
    ),
    ConfigDefinition(
        "group.max.session.timeout.ms",
        _I,
        "1800000",
        "",
        "the longest session that a group member may ask for",
        minimum=1,
    ),
    ConfigDefinition(
        "group.initial.rebalance.delay.ms",
        _I,
        "0",
        "",
        "how long the first member of a group waits for others; Kafka's default is 3000",
        minimum=0,
    ),
    ConfigDefinition("group.max.size", _I, "10000", "", "members of one group at most", minimum=1),
    ConfigDefinition(
        "group.consumer.session.timeout.ms",
        _I,
        "45000",
        "",
        "how long a member of the consumer protocol may be silent",
        minimum=1,
    ),
    ConfigDefinition(
        "group.consumer.heartbeat.interval.ms",
        _I,
        "3000",
        "",
        "how often members of the consumer protocol report; Kafka's default is 5000",
        minimum=1,
    ),
    ConfigDefinition(
        "offset.metadata.max.bytes", _I, "4096", "", "text that may be committed with an offset", minimum=0
    ),
    ConfigDefinition(
        "offsets.retention.minutes",
        _I,
        "10080",
        "",
        "forget offsets of a group so long after its last member left",
        minimum=1,
    ),
    ConfigDefinition(
        "offsets.retention.check.interval.ms",
        _L,
        "600000",
        "",
        "how often expired offsets are looked for",
        minimum=1,
    ),
    ConfigDefinition(
        "transaction.max.timeout.ms",
        _I,
        "900000",
        "",
        "the longest transaction timeout that a client may ask for",
        minimum=1,
    ),
    ConfigDefinition(
        "transaction.max.partitions", _I, "10000", "", "partitions in one transaction at most", minimum=1
    ),
    ConfigDefinition(
        "max.open.transactions", _I, "100000", "", "transactions that one principal may have open", minimum=1
    ),
    ConfigDefinition(
        "max.transactional.ids", _I, "250000", "", "transactional ids that are known at a time", minimum=1
    ),
    ConfigDefinition(
        "transactional.id.expiration.ms",
        _I,
        "604800000",
        "",
        "forget a transactional id that has been idle for so long",
        minimum=1,
    ),
    ConfigDefinition(
        "transaction.two.phase.commit.enable",
        _B,
        "false",
        "",
        "let clients keep prepared transactions open without a timeout (KIP-939)",
    ),
    ConfigDefinition(
        "producer.id.expiration.ms",
        _I,
        "86400000",
        "",
        "forget a producer that has been silent for so long",
        minimum=1,
    ),
    ConfigDefinition(
        "testing.fault",
        _S,
        "none",
        "",
        "break a promise on purpose, to test the checkers; refused unless SEMEL_TESTING=1",
        choices=("none", "skip-marker", "lose-dedup", "show-past-lso", "show-before-durable"),
    ),
)

# A topic's settings under the names of their defaults.
_TOPIC_DEFAULTS: Final = tuple(
    ConfigDefinition(
        item.server_name,
        item.kind,
        item.default,
        item.name,
        f"default of {item.name}: {item.summary}",
        minimum=item.minimum,
        maximum=item.maximum,
        choices=item.choices,
    )
    for item in TOPIC_CONFIGS.values()
)

SETTINGS: Final[dict[str, ConfigDefinition]] = {item.name: item for item in _OWN + _TOPIC_DEFAULTS}
_TOPIC_NAME_OF: Final = {item.server_name: item.name for item in TOPIC_CONFIGS.values()}
_FROM_VARIABLE: Final = {
    ENVIRONMENT_PREFIX + name.upper().replace(".", "_").replace("-", "_"): name for name in SETTINGS
}


@dataclass(slots=True, frozen=True)
class Value:
    """What a setting is, and who said so."""

    text: str
    source: str


class Settings:
    """Every setting with a value; wrong names and values have been refused."""

    def __init__(self, given: Mapping[str, Value]) -> None:
        for name, value in given.items():
            definition = SETTINGS.get(name)
            if definition is None:
                raise ConfigError(
                    f"there is no setting {name!r} ({value.source}); `semel config show` lists them all"
                )
            try:
                definition.check(value.text)
            except ConfigError as error:
                raise ConfigError(f"{error} ({value.source})") from None
        self._given = dict(given)

    @classmethod
    def load(
        cls,
        *,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> Settings:
        """Gather what the file, the environment and the flags say; the later of them wins."""
        given = {} if file is None else read_file(file)
        for variable, text in (environment or {}).items():
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in FOREIGN_VARIABLES:
                name = _FROM_VARIABLE.get(variable)
                if name is None:
                    raise ConfigError(
                        f"there is no setting for the environment variable {variable}; unset it"
                    )
                given[name] = Value(text, f"environment {variable}")
        for name, text in (flags or {}).items():
            given[name] = Value(text, "flag")
        return cls(given)

    def value(self, name: str) -> Value:
        found = self._given.get(name)
        return Value(SETTINGS[name].default, "default") if found is None else found

    def text(self, name: str) -> str:
        return self.value(name).text

    def integer(self, name: str) -> int:
        return int(self.text(name))

    def flag(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def topic_defaults(self) -> dict[str, str]:
        """What this broker says about settings that topics leave open, by the topic's names."""
        return {
            topic_name: self._given[name].text
            for name, topic_name in _TOPIC_NAME_OF.items()
            if name in self._given
        }

    def described(self) -> list[BrokerSetting]:
        return [
            BrokerSetting(name, self.text(name), definition.kind, name in self._given, definition.summary)
            for name, definition in SETTINGS.items()
        ]


def read_file(path: Path) -> dict[str, Value]:
    """A properties file: `name=value` lines, `#` comments."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the settings in {path}: it is not UTF-8 text") from None
    values = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith(("#", "!")):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{path}:{number}: expected name=value, found {text!r}")
        values[name.strip()] = Value(value.strip(), f"{path}:{number}")
    return values


def parse_address(text: str, setting: str) -> tuple[str, int]:
    """`host:port`, `[v6]:port` or Kafka's `PLAINTEXT://host:port`."""
    address = text.removeprefix("PLAINTEXT://")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{setting} must be host:port, such as 127.0.0.1:9092, not {text!r}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """What `parse_address` takes apart; an IPv6 address goes in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
