"""What a client knows of a cluster: brokers, topics, and who leads which partition."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from semel.errors import ConfigError
from semel.wire.messages.metadata import MetadataResponse, MetadataResponsePartition, MetadataResponseTopic

DEFAULT_PORT: Final = 9092
NO_NODE: Final = -1


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True, frozen=True)
class Broker:
    node_id: int
    address: Address
    rack: str | None


@dataclass(slots=True, frozen=True)
class Partition:
    partition: int
    leader_id: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    offline_replicas: tuple[int, ...]
    error_code: int


@dataclass(slots=True, frozen=True)
class Topic:
    name: str
    topic_id: bytes
    is_internal: bool
    partitions: tuple[Partition, ...]


@dataclass(slots=True, frozen=True)
class ClusterView:
    """One answer to a metadata request."""

    cluster_id: str | None
    controller_id: int
    brokers: tuple[Broker, ...]


def parse_addresses(bootstrap: str) -> list[Address]:
    """Reads `host:port,host:port`; the port may be left out, IPv6 hosts stand in brackets."""
    addresses = [_parse_address(part.strip()) for part in bootstrap.split(",") if part.strip()]
    if not addresses:
        raise ConfigError("no broker address was given: say where to connect, as HOST:PORT")
    return addresses


def _parse_address(text: str) -> Address:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        colon, port = (rest[:1], rest[1:])
        wellformed = bool(bracket) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        wellformed = ":" not in port
    if not wellformed or not host or (colon and not _is_port(port)):
        raise ConfigError(f"{text!r} is no broker address: write HOST:PORT, or [HOST]:PORT for IPv6")
    return Address(host, int(port) if colon else DEFAULT_PORT)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def cluster_view(response: MetadataResponse) -> ClusterView:
    return ClusterView(
        cluster_id=response.cluster_id,
        controller_id=response.controller_id,
        brokers=tuple(
            Broker(broker.node_id, Address(broker.host, broker.port), broker.rack)
            for broker in response.brokers
        ),
    )


def topic_view(topic: MetadataResponseTopic) -> Topic:
    return Topic(
        name=topic.name or "",
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=tuple(
            _partition_view(partition) for partition in sorted(topic.partitions, key=_partition_index)
        ),
    )


def _partition_index(partition: MetadataResponsePartition) -> int:
    return partition.partition_index


def _partition_view(partition: MetadataResponsePartition) -> Partition:
    return Partition(
        partition=partition.partition_index,
        leader_id=partition.leader_id,
        leader_epoch=partition.leader_epoch,
        replicas=tuple(partition.replica_nodes),
        in_sync_replicas=tuple(partition.isr_nodes),
        offline_replicas=tuple(partition.offline_replicas),
        error_code=partition.error_code,
    )
