"""Client quotas: what users and client ids may use, and which quota counts for whom.

A quota belongs to an *entity*: a user, a client id, or a user with a client id; each by name or as the
default for all who have none of their own. Of the entities that fit a client, the most specific one that
sets a value decides, in Kafka's order: the user comes before the client id, and a name before a default.
Clients share what that entity is: all client ids of a user share a user's quota, and each has its own
under (user, default client id).

The values are journaled; how much was used is not (`semel.server.quotas` measures it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from semel.broker.journal_messages import QuotaEntity, QuotaSet, QuotaValue

USER: Final = "user"
CLIENT_ID: Final = "client-id"
PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
QUOTA_KEYS: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE)

MAX_ENTITIES: Final = 10_000
MAX_REMEMBERED: Final = 10_000
"""Answers to "which quota counts for this client?" that are kept; clients may call themselves anything."""

Entity: TypeAlias = tuple[tuple[str, str | None], ...]
"""Types with names, sorted by type; a name of None is the default of its type."""


@dataclass(slots=True, frozen=True)
class Quota:
    """What counts for a client: the limit per second, and with whom it shares that."""

    limit: float
    user: str | None
    """None: all users together."""
    client_id: str | None


def entity_of(parts: Iterable[tuple[str, str | None]]) -> Entity:
    return tuple(sorted(parts, key=_entity_type))


def _entity_type(part: tuple[str, str | None]) -> str:
    return part[0]


class Quotas:
    """All quotas by entity."""

    __slots__ = ("_remembered", "by_entity")

    def __init__(self) -> None:
        self.by_entity: dict[Entity, dict[str, float]] = {}
        self._remembered: dict[tuple[str, str, str], Quota | None] = {}

    @property
    def remembered(self) -> int:
        return len(self._remembered)

    def set(self, entry: QuotaSet) -> None:
        """From now on the entity has these values, and no others."""
        entity = entity_of((part.entity_type, part.entity_name) for part in entry.entity)
        if entry.values:
            self.by_entity[entity] = {value.key: value.value for value in entry.values}
        else:
            self.by_entity.pop(entity, None)
        self._remembered.clear()

    def quota(self, key: str, user: str, client_id: str) -> Quota | None:
        """The quota of this kind that counts for a client, or None if it may use what it likes."""
        asked = (key, user, client_id)
        if asked not in self._remembered:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[asked] = self._find(key, user, client_id)
        return self._remembered[asked]

    def _find(self, key: str, user: str, client_id: str) -> Quota | None:
        for entity in _candidates(user, client_id):
            limit = self.by_entity.get(entity, {}).get(key)
            if limit is not None:
                types = {entity_type for entity_type, _ in entity}
                return Quota(
                    limit, user if USER in types else None, client_id if CLIENT_ID in types else None
                )
        return None


def _candidates(user: str, client_id: str) -> list[Entity]:
    """The entities that fit a client, the most specific one first."""
    clients: tuple[str | None, ...] = (client_id, None)
    found: list[Entity] = []
    for user_name in (user, None):
        found += [((CLIENT_ID, client), (USER, user_name)) for client in clients]
        found.append(((USER, user_name),))
    found += [((CLIENT_ID, client),) for client in clients]
    return found


def quota_set(entity: Entity, values: dict[str, float]) -> QuotaSet:
    return QuotaSet(
        entity=[QuotaEntity(entity_type=kind, entity_name=name) for kind, name in entity],
        values=[QuotaValue(key=key, value=value) for key, value in values.items()],
    )
