"""The notation refuses what it does not understand, and the generated files are what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from wiregen.notation import NotationError, Versions, parse  # noqa: E402
from wiregen.python import generate  # noqa: E402

GOOD = """# Sample: a message.

api 99 Sample
versions 1-5
flexible 3+

request
  name     string?v2+
  kind     int8        v2-4 = 7
  items    [Item]?
  comment  string?     v4+ tag 0 = null

struct Item
  key  uuid
"""


def definition(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "sample.wire"
    path.write_text(text)
    return parse(path)


def test_generated_files_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_wire.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_notation_is_read_as_it_is_meant(tmp_path: Path) -> None:
    sample = definition(tmp_path, GOOD)
    name, kind, items, comment = sample.structs["SampleRequest"].fields
    assert (sample.key, sample.versions, sample.flexible_from) == (99, Versions(1, 5), 3)
    assert (name.nullable, name.versions) == (Versions(2, 5), Versions(1, 5))
    assert (kind.versions, kind.default) == (Versions(2, 4), "7")
    assert (items.is_array, items.base, items.nullable) == (True, "Item", Versions(1, 5))
    assert (comment.tag, comment.versions) == (0, Versions(4, 5))


def test_generated_code_runs(tmp_path: Path) -> None:
    module = type(sys)("sample")
    sys.modules["sample"] = module
    try:
        exec(generate(definition(tmp_path, GOOD)), module.__dict__)
    finally:
        del sys.modules["sample"]
    request_type, item_type = module.SampleRequest, module.Item
    request = request_type(name="n", kind=3, items=[item_type(b"i" * 16)], comment="c")
    out = bytearray()
    request.encode(out, 5, [])
    # kind is gone in v5: the default takes its place.
    assert request_type.decode(memoryview(out), 0, 5)[0] == request_type("n", 7, [item_type(b"i" * 16)], "c")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  name string = ", "not a field"),
        ("  name strung", "unknown type strung"),
        ("  name Missing", "unknown struct Missing"),
        ("  name [bool]", "arrays of bool"),
        ("  name int32?", "cannot be null"),
        ("  name string v1+ tag 0", "a tag below the first flexible version"),
        ('  name string? v3+ tag 0 = ""', "null by default"),
        ("  name records", "records are nullable"),
        ("  one int8 v3+ tag 1\n  two int8 v3+ tag 0", "tags out of order"),
        ("struct SampleRequest", "a second SampleRequest"),
        ("structure Item", "an unknown heading"),
    ],
)
def test_a_bad_definition_is_refused_with_its_place(tmp_path: Path, line: str, problem: str) -> None:
    head = "# Sample\napi 99 Sample\nversions 1-5\nflexible 3+\nrequest\n"
    with pytest.raises(NotationError, match=problem) as caught:
        definition(tmp_path, head + line + "\n")
    assert "sample.wire" in str(caught.value)
