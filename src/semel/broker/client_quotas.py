"""DescribeClientQuotas (48), AlterClientQuotas (49): show and set what clients may use."""

from __future__ import annotations

from enum import IntEnum
from math import isfinite
from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Entry
from semel.broker.quotas import (
    CLIENT_ID,
    MAX_ENTITIES,
    QUOTA_KEYS,
    REQUEST_PERCENTAGE,
    USER,
    Entity,
    entity_of,
    quota_set,
)
from semel.broker.refusal import Refused
from semel.wire.errors import ErrorCode
from semel.wire.messages import alter_client_quotas as altering
from semel.wire.messages import describe_client_quotas as describing

_ENTITY_TYPES: Final = (USER, CLIENT_ID)
_IP: Final = "ip"


class MatchType(IntEnum):
    """How a filter meets the name of an entity."""

    EXACT = 0
    DEFAULT = 1
    ANY = 2


def describe_client_quotas(
    broker: Broker, request: describing.DescribeClientQuotasRequest, caller: Caller, now: Now
) -> Decision:
    try:
        components = _checked_filter(request)
    except Refused as refused:
        return Decision(
            describing.DescribeClientQuotasResponse(
                error_code=refused.code, error_message=refused.reason, entries=None
            )
        )
    entries = [
        describing.EntryData(
            entity=[describing.EntityData(entity_type=kind, entity_name=name) for kind, name in entity],
            values=[describing.ValueData(key=key, value=value) for key, value in values.items()],
        )
        for entity, values in broker.quotas.by_entity.items()
        if _matches(entity, components, request.strict)
    ]
    return Decision(describing.DescribeClientQuotasResponse(entries=entries))


def _checked_filter(
    request: describing.DescribeClientQuotasRequest,
) -> dict[str, describing.ComponentData]:
    components: dict[str, describing.ComponentData] = {}
    for component in request.components:
        kind = component.entity_type
        if kind not in (*_ENTITY_TYPES, _IP):
            raise Refused(ErrorCode.UNSUPPORTED_VERSION, f"there are no quotas for entities of type '{kind}'")
        if kind in components:
            raise Refused(ErrorCode.INVALID_REQUEST, f"the filter names '{kind}' twice")
        if component.match_type not in tuple(MatchType):
            raise Refused(ErrorCode.INVALID_REQUEST, f"{component.match_type} is no way to match a name")
        if (component.match_type == MatchType.EXACT) != (component.match is not None):
            raise Refused(ErrorCode.INVALID_REQUEST, "a name is given for an exact match, and only then")
        components[kind] = component
    return components


def _matches(entity: Entity, components: dict[str, describing.ComponentData], strict: bool) -> bool:
    names = dict(entity)
    if strict and names.keys() != components.keys():
        return False
    return all(
        kind in names and _matches_name(names[kind], component) for kind, component in components.items()
    )


def _matches_name(name: str | None, component: describing.ComponentData) -> bool:
    match component.match_type:
        case MatchType.EXACT:
            return name == component.match
        case MatchType.DEFAULT:
            return name is None
        case _:
            return True


def alter_client_quotas(
    broker: Broker, request: altering.AlterClientQuotasRequest, caller: Caller, now: Now
) -> Decision:
    entries: list[Entry] = []
    results = []
    changed: dict[Entity, dict[str, float]] = {}
    for wanted in request.entries:
        result = altering.ResponseEntryData(entity=wanted.entity)
        try:
            entity = _checked_entity(wanted)
            if entity in changed:
                raise Refused(ErrorCode.INVALID_REQUEST, "the entity is named twice in one request")
            known = broker.quotas.by_entity
            if entity not in known and len(known) + len(changed) >= MAX_ENTITIES:
                raise Refused(ErrorCode.INVALID_REQUEST, f"there are {MAX_ENTITIES} quotas already")
            values = dict(known.get(entity, {}))
            for change in wanted.ops:
                _change(values, change)
            changed[entity] = values
            entries.append(quota_set(entity, values))
        except Refused as refused:
            result.error_code, result.error_message = refused.code, refused.reason
        results.append(result)
    reply = altering.AlterClientQuotasResponse(entries=results)
    return Decision(reply, [] if request.validate_only else entries)


def _checked_entity(wanted: altering.RequestEntryData) -> Entity:
    kinds = [part.entity_type for part in wanted.entity]
    if not kinds:
        raise Refused(ErrorCode.INVALID_REQUEST, "a quota needs a user or a client id to belong to")
    for kind in kinds:
        if kind not in _ENTITY_TYPES:
            raise Refused(
                ErrorCode.INVALID_REQUEST,
                f"there are no quotas for '{kind}' here, only for {' and '.join(_ENTITY_TYPES)}",
            )
    if len(set(kinds)) < len(kinds):
        raise Refused(ErrorCode.INVALID_REQUEST, "an entity has each type once at most")
    if any(part.entity_name == "" for part in wanted.entity):
        raise Refused(ErrorCode.INVALID_REQUEST, "the name of an entity cannot be empty; null is the default")
    return entity_of((part.entity_type, part.entity_name) for part in wanted.entity)


def _change(values: dict[str, float], change: altering.OpData) -> None:
    if change.key not in QUOTA_KEYS:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"there is no quota '{change.key}' here, only {', '.join(QUOTA_KEYS)}",
        )
    if change.remove:
        values.pop(change.key, None)
        return
    if not isfinite(change.value) or change.value <= 0:
        raise Refused(ErrorCode.INVALID_REQUEST, f"{change.key} must be above 0, not {change.value:g}")
    if change.key != REQUEST_PERCENTAGE and not change.value.is_integer():
        raise Refused(ErrorCode.INVALID_REQUEST, f"{change.key} must be whole bytes, not {change.value:g}")
    values[change.key] = change.value
