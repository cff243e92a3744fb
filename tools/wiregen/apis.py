"""The table of APIs, generated from the same definitions as the messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from wiregen.notation import NEVER, Definition
from wiregen.python import GENERATED

OPENING = f'''"""The APIs that Semel speaks: keys, names, versions. Imports no message.

{GENERATED} schema/*.wire; edit those files instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from semel.wire.primitives import NEVER


class ApiKey(IntEnum):
'''

MIDDLE = '''

@dataclass(frozen=True, slots=True)
class Api:
    """One API: `advertised_min_version` may lie below the versions that are served, and only there."""

    key: ApiKey
    name: str
    min_version: int
    max_version: int
    flexible_from: int
    advertised_min_version: int

    def serves(self, version: int) -> bool:
        return self.min_version <= version <= self.max_version

    def request_header_version(self, version: int) -> int:
        return 2 if version >= self.flexible_from else 1

    def response_header_version(self, version: int) -> int:
        # A client that asks for versions does not know yet which header its broker would use.
        if self.key == ApiKey.API_VERSIONS:
            return 0
        return 1 if version >= self.flexible_from else 0


# Keyed by plain int: what a request header holds may be no key at all.
APIS: dict[int, Api] = {
'''


def generate_apis(definitions: Sequence[Definition]) -> str:
    keyed = sorted((definition.key, definition) for definition in definitions if definition.key is not None)
    members = [f"    {_constant(definition.name)} = {key}\n" for key, definition in keyed]
    rows = [f"    {key}: {_row(definition)},\n" for key, definition in keyed]
    return "".join([OPENING, *members, MIDDLE, *rows, "}\n"])


def _row(definition: Definition) -> str:
    versions, advertised = definition.versions, definition.advertised or definition.versions
    flexible = "NEVER" if definition.flexible_from == NEVER else str(definition.flexible_from)
    return (
        f'Api(ApiKey.{_constant(definition.name)}, "{definition.name}", '
        f"{versions.first}, {versions.last}, {flexible}, {advertised.first})"
    )


def _constant(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
