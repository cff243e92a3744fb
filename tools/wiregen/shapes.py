"""The shapes of requests, generated from the same definitions as the messages: enough to walk over one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import calcsize

from wiregen.notation import FIXED, Definition, FieldSpec, StructSpec, Versions
from wiregen.python import GENERATED

OPENING = f'''"""What requests are made of, for whoever walks over one without making anything of it.

{GENERATED} schema/*.wire; edit those files instead.
"""

from __future__ import annotations

from typing import Final

from semel.wire.counting import Field, Kind

REQUESTS: Final[dict[int, tuple[Field, ...]]] = {{
'''


def generate_shapes(definitions: Sequence[Definition]) -> str:
    keyed = sorted((definition.key, definition) for definition in definitions if definition.key is not None)
    lines = [OPENING]
    for key, definition in keyed:
        request = definition.structs[f"{definition.name}Request"]
        lines.append(f"    {key}: (  # {definition.name}\n")
        lines += _fields(definition, request, definition.versions, 2)
        lines.append("    ),\n")
    return "".join([*lines, "}\n"])


def _fields(definition: Definition, struct: StructSpec, within: Versions, level: int) -> Iterator[str]:
    """Tagged fields are not among them: whoever walks passes over tags as they come."""
    indent = "    " * level
    for spec in struct.fields:
        versions = spec.versions.overlap(within)
        if versions is None or spec.tag is not None:
            continue
        start = f"{versions.first}, {versions.last}, Kind.{_kind(spec)}"
        if spec.is_struct:
            yield f"{indent}Field(\n"
            for argument in start.split(", "):
                yield f"{indent}    {argument},\n"
            yield _nested(
                list(_fields(definition, definition.structs[spec.base], versions, level + 2)), indent
            )
            yield f"{indent}),\n"
        elif spec.base in FIXED:
            yield f"{indent}Field({start}, {calcsize('>' + FIXED[spec.base])}),\n"
        else:
            yield f"{indent}Field({start}),\n"


def _nested(fields: Sequence[str], indent: str) -> str:
    """The fields of a struct, as the formatter would have them."""
    if len(fields) == 1:
        return f"{indent}    fields=({fields[0].strip()}),\n"
    return "".join([f"{indent}    fields=(\n", *fields, f"{indent}    ),\n"])


def _kind(spec: FieldSpec) -> str:
    if spec.is_struct:
        if spec.is_array:
            return "STRUCTS"
        return "STRUCT" if spec.nullable is None else "OPTIONAL_STRUCT"
    if spec.is_array:
        return "STRINGS" if spec.base == "string" else "NUMBERS"
    if spec.base in FIXED:
        return "NUMBER"
    return "STRING" if spec.base == "string" else "BYTES"
