"""Our notation for Kafka's messages, and its parser.

One file describes one API:

    # Produce: append record batches to partitions.

    api 0 Produce
    versions 3-13               the versions that have a codec
    advertised 0-13             only where the broker must claim more
    flexible 9+                 the first version with compact types and tagged fields

    request                     also: response, message <Name> (no API of its own), struct <Name>
      transactional_id  string?  = null
      topic_data        [TopicProduceData]

A field is a name, a type and what is special about it, in this order:

    [int32]         an array of int32; of structs likewise
    string?         nullable in every version that has the field; string?v7+ only since v7
    v5+             the versions that have the field (v5+, v3-12, v7); all of its struct's if left out
    tag 0           a tagged field of the flexible versions
    = -1            the default; otherwise zero, empty, or null where null is always allowed

A tagged struct that is absent is None in Python: a response of a thousand partitions shall not hold
three thousand structs that say nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

NEVER = 32767

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
VARIABLE = ("string", "bytes", "records")
ARRAY_ELEMENTS = ("int8", "int32", "int64", "string")

FIELD = re.compile(
    r"(?P<name>[a-z]\w*)\s+"
    r"(?P<array>\[)?(?P<base>\w+)(?(array)\])"
    r"(?P<nullable>\?(?P<nullable_versions>v[\d+-]+)?)?"
    r"(?:\s+(?P<versions>v[\d+-]+))?"
    r"(?:\s+tag (?P<tag>\d+))?"
    r"(?:\s+= (?P<default>\S+))?"
)


class NotationError(Exception):
    """A definition does not say what it should."""


@dataclass(frozen=True)
class Versions:
    first: int
    last: int

    @staticmethod
    def parse(text: str, last: int) -> Versions:
        numbers = text.lstrip("v")
        if numbers.endswith("+"):
            return Versions(int(numbers[:-1]), last)
        low, _, high = numbers.partition("-")
        return Versions(int(low), int(high or low))

    def overlap(self, other: Versions) -> Versions | None:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return Versions(first, last) if first <= last else None

    def covers(self, other: Versions) -> bool:
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class FieldSpec:
    name: str
    base: str
    is_array: bool
    versions: Versions
    nullable: Versions | None
    tag: int | None
    default: str | None

    @property
    def is_struct(self) -> bool:
        return self.base[0].isupper()

    @property
    def is_fixed(self) -> bool:
        return self.base in FIXED and not self.is_array


@dataclass
class StructSpec:
    name: str
    fields: list[FieldSpec] = field(default_factory=list)
    is_root: bool = False
    versions: Versions = Versions(0, 0)


@dataclass
class Definition:
    module: str
    about: str
    name: str = ""
    key: int | None = None
    versions: Versions = Versions(0, 0)
    advertised: Versions | None = None
    flexible_from: int = NEVER
    structs: dict[str, StructSpec] = field(default_factory=dict)

    @property
    def roots(self) -> list[StructSpec]:
        return [struct for struct in self.structs.values() if struct.is_root]


def parse(path: Path) -> Definition:
    lines = path.read_text().splitlines()
    definition = Definition(module=path.stem, about=lines[0].lstrip("# "))
    struct: StructSpec | None = None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].rstrip()
        try:
            if not text:
                continue
            if text.startswith(" "):
                if struct is None:
                    raise NotationError("a field outside of a struct")
                struct.fields.append(_parse_field(text.strip(), definition.versions))
            else:
                struct = _parse_heading(text.split(), definition) or struct
        except (NotationError, ValueError) as error:
            raise NotationError(f"{path.name}:{number}: {error}: {line.strip()!r}") from None
    for root in definition.roots:
        _spread_versions(definition, root, definition.versions, path.name)
    _check(definition, path.name)
    return definition


def _parse_heading(words: list[str], definition: Definition) -> StructSpec | None:
    match words:
        case ["api", key, name]:
            definition.key, definition.name = int(key), name
        case ["versions", versions]:
            definition.versions = Versions.parse(versions, 0)
        case ["advertised", versions]:
            definition.advertised = Versions.parse(versions, 0)
        case ["flexible", first]:
            definition.flexible_from = int(first.removesuffix("+"))
        case ["request" | "response" as kind]:
            return _add_struct(definition, definition.name + kind.capitalize(), is_root=True)
        case ["message", name]:
            return _add_struct(definition, name, is_root=True)
        case ["struct", name]:
            return _add_struct(definition, name, is_root=False)
        case _:
            raise NotationError("an unknown heading")
    return None


def _add_struct(definition: Definition, name: str, *, is_root: bool) -> StructSpec:
    if name in definition.structs:
        raise NotationError(f"a second {name}")
    struct = StructSpec(name, is_root=is_root)
    definition.structs[name] = struct
    return struct


def _parse_field(text: str, versions: Versions) -> FieldSpec:
    match = FIELD.fullmatch(text)
    if match is None:
        raise NotationError("not a field")
    own = Versions.parse(match["versions"], versions.last) if match["versions"] else versions
    nullable = None
    if match["nullable"]:
        spelled = match["nullable_versions"]
        nullable = Versions.parse(spelled, versions.last) if spelled else own
    return FieldSpec(
        name=match["name"],
        base=match["base"],
        is_array=match["array"] is not None,
        versions=own,
        nullable=nullable,
        tag=int(match["tag"]) if match["tag"] else None,
        default=match["default"],
    )


def _spread_versions(definition: Definition, struct: StructSpec, versions: Versions, where: str) -> None:
    """A struct exists in the versions of the fields that hold it."""
    known = struct.versions if struct.versions.last else versions
    struct.versions = Versions(min(known.first, versions.first), max(known.last, versions.last))
    for spec in struct.fields:
        if spec.is_struct:
            if spec.base not in definition.structs:
                raise NotationError(f"{where}: {struct.name}.{spec.name} is of an unknown struct {spec.base}")
            overlap = spec.versions.overlap(versions)
            if overlap is not None:
                _spread_versions(definition, definition.structs[spec.base], overlap, where)


def _check(definition: Definition, where: str) -> None:
    for struct in definition.structs.values():
        tags = [spec.tag for spec in struct.fields if spec.tag is not None]
        if tags != sorted(set(tags)):
            raise NotationError(f"{where}: {struct.name} has tags out of order: {tags}")
        for spec in struct.fields:
            label = f"{where}: {struct.name}.{spec.name}"
            if not spec.is_struct and spec.base not in FIXED and spec.base not in VARIABLE:
                raise NotationError(f"{label} is of an unknown type {spec.base}")
            if spec.is_array and not spec.is_struct and spec.base not in ARRAY_ELEMENTS:
                raise NotationError(f"{label}: arrays of {spec.base} are not needed so far")
            if spec.nullable is not None and spec.is_fixed:
                raise NotationError(f"{label}: {spec.base} cannot be null")
            if spec.base == "records" and (spec.tag is not None or spec.nullable != spec.versions):
                raise NotationError(f"{label}: records are nullable and never tagged")
            if spec.tag is not None and spec.versions.first < definition.flexible_from:
                raise NotationError(f"{label}: a tag below the first flexible version")
            if spec.tag is not None and spec.nullable is not None and spec.default != "null":
                raise NotationError(f"{label}: a nullable tagged field must be null by default")
