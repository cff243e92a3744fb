"""The types of the fields of generated messages, read from their source: compiled ones do not say them."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any


def field_hints(message_type: Any) -> dict[str, str]:
    """The fields of a generated class, and their types as its constructor writes them."""
    module = sys.modules[message_type.__module__]
    hints = _constructor_hints(Path(str(module.__file__)))[message_type.__name__]
    return {name: hints[name] for name in message_type.FIELDS}


@cache
def _constructor_hints(module: Path) -> dict[str, dict[str, str]]:
    source = module.with_name(module.name.partition(".")[0] + ".py").read_text()
    return {
        found.name: {arg.arg: ast.unparse(arg.annotation) for arg in method.args.args if arg.annotation}
        for found in ast.parse(source).body
        if isinstance(found, ast.ClassDef)
        for method in found.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }
