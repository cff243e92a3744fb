"""Generate the messages of the gRPC service from its .proto.

python tools/generate_proto.py            write what has changed
python tools/generate_proto.py --check    fail if anything would change

The output depends on the version of protoc, which comes with grpcio-tools: use the one of the locked
requirements. Older protobuf libraries than that refuse the generated code, so `semel[grpc]` asks for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parent.parent / "src"
PROTO: Final = Path("semel/subscriptions/grpc/subscriptions.proto")
GENERATED: Final = (PROTO.with_name("subscriptions_pb2.py"), PROTO.with_name("subscriptions_pb2.pyi"))


def wanted_files() -> dict[Path, str]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SOURCE}"),
                *(f"--python_out={folder}", f"--pyi_out={folder}", str(PROTO)),
            ],
            check=True,
        )
        return {path: (Path(folder) / path).read_text() for path in GENERATED}


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if files are stale"
    )
    check: bool = arguments.parse_args().check
    is_stale = False
    for path, text in wanted_files().items():
        target = SOURCE / path
        if target.exists() and target.read_text() == text:
            continue
        is_stale = True
        print(f"{'stale' if check else 'written'}: src/{path}")
        if not check:
            target.write_text(text)
    if check and is_stale:
        print("run: python tools/generate_proto.py", file=sys.stderr)
    return 1 if check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
