"""Coverage-guided fuzzing of every decoder, for as long as one likes.

    pip install atheris
    python tests/fuzz/fuzz_messages.py -max_total_time=600 [corpus folder]

The first two bytes choose the message and the version, the rest is its content. A decoder may answer with a
message or with DecodeError; a message that was read must encode, and read back as the same.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit" / "wire")]

with atheris.instrument_imports(include=["semel.wire"]):
    from wire_messages import MESSAGE_VERSIONS, encoded, random_message

    from semel.wire.frames import decode_request_header
    from semel.wire.primitives import DecodeError


def fuzz(content: bytes) -> None:
    if len(content) < 2:
        return
    message = MESSAGE_VERSIONS[int.from_bytes(content[:2], "big") % len(MESSAGE_VERSIONS)]
    buf = memoryview(content)[2:]
    try:
        decode_request_header(buf)
    except DecodeError:
        pass
    try:
        decoded, end = message.message_type.decode(buf, 0, message.version)
    except DecodeError:
        return
    assert end <= len(buf)
    written = encoded(decoded, message.version)
    again, end = message.message_type.decode(memoryview(written), 0, message.version)
    # Compared as bytes: a float that is not a number is not equal to itself.
    assert end == len(written) and encoded(again, message.version) == written, f"{message}: {decoded}"


def write_seeds(folder: Path) -> None:
    """One valid message of each kind and version to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, message in enumerate(MESSAGE_VERSIONS):
        content = encoded(random_message(message.message_type, random.Random(index)), message.version)
        (folder / str(message)).write_bytes(index.to_bytes(2, "big") + content)


if __name__ == "__main__":
    corpora = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for corpus in corpora[:1]:
        write_seeds(corpus)
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
