"""What is on the list of compiled modules can be compiled: it exists, and nothing else inherits from it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from semel.broker import core
from semel.compilation import is_compiled

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import compile as compilation  # noqa: E402

COMPILED = {f"semel.{module}" for module in compilation.MODULES}
INHERITABLE = {("semel.wire.primitives", "MessageStruct"), ("semel.wire.frames", "Message")}
"""The base of all messages, which says so to mypyc, and a protocol, of which there are no instances."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(compilation.SOURCE).with_suffix("").parts)


def inherited(path: Path) -> Iterator[tuple[str, str]]:
    """The classes of other modules that classes of this one inherit from, by module and name."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                imported[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in imported
            )


def test_every_module_of_the_list_is_there() -> None:
    assert not [
        module for module in COMPILED if not (ROOT / "src" / (module.replace(".", "/") + ".py")).exists()
    ]


def test_what_inherits_from_a_compiled_class_is_compiled() -> None:
    wrong = [
        (module_name(path), parent)
        for path in (compilation.SOURCE / "semel").rglob("*.py")
        if module_name(path) not in COMPILED
        for parent in inherited(path)
        if parent[0] in COMPILED and parent not in INHERITABLE
    ]
    assert not wrong, "add these modules to tools/compile.py"


def test_it_is_known_which_form_runs() -> None:
    assert is_compiled() == (not str(core.__file__).endswith(".py"))
