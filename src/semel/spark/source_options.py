"""The options of the reader, under the names that Spark's own Kafka source has for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeVar

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from semel.client.connection import ConnectionOptions
from semel.client.metadata import parse_addresses
from semel.errors import ConfigError
from semel.spark.source_offsets import Offsets, parse
from semel.spark.source_security import SECURITY_OPTIONS, read_security

T = TypeVar("T")

FORMAT: Final = "semel"
BOOTSTRAP: Final = "kafka.bootstrap.servers"
SUBSCRIBE: Final = "subscribe"
ISOLATION_LEVEL: Final = "kafka.isolation.level"
STARTING_OFFSETS: Final = "startingOffsets"
ENDING_OFFSETS: Final = "endingOffsets"
MAX_OFFSETS: Final = "maxOffsetsPerTrigger"
FAIL_ON_DATA_LOSS: Final = "failOnDataLoss"
MIN_PARTITIONS: Final = "minPartitions"
INCLUDE_HEADERS: Final = "includeHeaders"

KNOWN: Final = (
    BOOTSTRAP,
    SUBSCRIBE,
    ISOLATION_LEVEL,
    STARTING_OFFSETS,
    ENDING_OFFSETS,
    MAX_OFFSETS,
    FAIL_ON_DATA_LOSS,
    MIN_PARTITIONS,
    INCLUDE_HEADERS,
    *SECURITY_OPTIONS,
)
CANONICAL: Final = {name.lower(): name for name in KNOWN}

# What holds unless the query says something else.
DEFAULTS: Final = {
    ISOLATION_LEVEL: "read_committed",
    STARTING_OFFSETS: "earliest",
    ENDING_OFFSETS: "latest",
    FAIL_ON_DATA_LOSS: "true",
    INCLUDE_HEADERS: "true",
}
CLIENT_ID: Final = "semel-spark"
ISOLATION_LEVELS: Final = {"read_committed": READ_COMMITTED, "read_uncommitted": READ_UNCOMMITTED}
NAMED_OFFSETS: Final = {"earliest": EARLIEST, "latest": LATEST}
BOOLEANS: Final = {"true": True, "false": False}


@dataclass(slots=True, frozen=True)
class SourceOptions:
    """What to read, and how. `starting`, `ending`: EARLIEST, LATEST, or an offset for each partition."""

    bootstrap: str
    connection: ConnectionOptions
    topics: tuple[str, ...]
    isolation_level: int
    starting: Offsets | int
    ending: Offsets | int
    max_offsets: int | None
    fail_on_data_loss: bool
    min_partitions: int | None
    include_headers: bool

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "SourceOptions":
        """Reads the options that a query was given; ConfigError says which one is wrong."""
        options = {**DEFAULTS, **_canonical(given)}
        bootstrap = options.get(BOOTSTRAP, "")
        parse_addresses(bootstrap)
        tls, sasl = read_security(options)
        ending = _place(options[ENDING_OFFSETS])
        if ending == EARLIEST:
            raise ConfigError(f"with {ENDING_OFFSETS}=earliest the batch ends where it begins: say latest")
        return cls(
            bootstrap=bootstrap,
            connection=ConnectionOptions(client_id=CLIENT_ID, tls=tls, sasl=sasl),
            topics=_topics(options.get(SUBSCRIBE, "")),
            isolation_level=_choice(options, ISOLATION_LEVEL, ISOLATION_LEVELS),
            starting=_place(options[STARTING_OFFSETS]),
            ending=ending,
            max_offsets=_positive(options, MAX_OFFSETS),
            fail_on_data_loss=_choice(options, FAIL_ON_DATA_LOSS, BOOLEANS),
            min_partitions=_positive(options, MIN_PARTITIONS),
            include_headers=_choice(options, INCLUDE_HEADERS, BOOLEANS),
        )


def _canonical(given: Mapping[str, str]) -> dict[str, str]:
    """Spark does not mind upper and lower case in the names of options."""
    options: dict[str, str] = {}
    for name, value in given.items():
        known = CANONICAL.get(name.lower())
        if known is None:
            raise _unknown(name)
        options[known] = value
    return options


def _unknown(name: str) -> ConfigError:
    alike = [CANONICAL[each] for each in get_close_matches(name.lower(), CANONICAL, n=1)]
    hint = f" Did you mean {alike[0]!r}?" if alike else ""
    return ConfigError(f"the reader has no option {name!r}.{hint} It has {', '.join(KNOWN)}")


def _topics(text: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not topics:
        raise ConfigError(f"no topic was given: name one, or several with commas, as {SUBSCRIBE!r}")
    return topics


def _choice(options: Mapping[str, str], name: str, choices: Mapping[str, T]) -> T:
    text = options[name].lower()
    if text not in choices:
        raise ConfigError(f"{name} is {text!r}: it must be {' or '.join(choices)}")
    return choices[text]


def _place(text: str) -> Offsets | int:
    place = NAMED_OFFSETS.get(text.lower())
    return parse(text) if place is None else place


def _positive(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{name} is {text!r}: it must be a whole number above 0")
    return int(text)
