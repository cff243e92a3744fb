"""Generate the codecs: `semel.wire.messages`, `apis` and `shapes` from `semel/wire/schema`, and the broker's
own messages, `semel.broker.*_messages`, from `semel/broker/schema`.

python tools/generate_wire.py            write what has changed
python tools/generate_wire.py --check    fail if anything would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wiregen.apis import generate_apis
from wiregen.notation import NotationError, parse
from wiregen.python import generate
from wiregen.shapes import generate_shapes

ROOT = Path(__file__).resolve().parent.parent
WIRE = ROOT / "src" / "semel" / "wire"
BROKER = ROOT / "src" / "semel" / "broker"
MESSAGES_INIT = '"""Kafka\'s messages, one module an API. Generated: see tools/generate_wire.py."""\n'


def wanted_files() -> dict[Path, str]:
    definitions = [parse(path) for path in sorted((WIRE / "schema").glob("*.wire"))]
    files = {
        WIRE / "messages" / f"{definition.module}.py": generate(definition) for definition in definitions
    }
    files[WIRE / "messages" / "__init__.py"] = MESSAGES_INIT
    files[WIRE / "apis.py"] = generate_apis(definitions)
    files[WIRE / "shapes.py"] = generate_shapes(definitions)
    for path in sorted((BROKER / "schema").glob("*.wire")):
        files[BROKER / f"{path.stem}.py"] = generate(parse(path))
    return files


def stale_files(wanted: dict[Path, str]) -> list[Path]:
    """Files to write, and files that no definition asks for any more."""
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    generated = sorted((WIRE / "messages").glob("*.py")) + sorted(BROKER.glob("*_messages.py"))
    return changed + [path for path in generated if path not in wanted]


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if files are stale"
    )
    check: bool = arguments.parse_args().check
    try:
        wanted = wanted_files()
    except NotationError as error:
        print(error, file=sys.stderr)
        return 2
    stale = stale_files(wanted)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if check:
            continue
        if path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    if check and stale:
        print("run: python tools/generate_wire.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
