"""How a client makes itself known and whom it trusts: TLS and SASL, as options that can be pickled.

Secrets are kept out of `repr`, so that they do not end up in logs with the options that hold them.
"""

import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from semel.errors import ConfigError

PLAIN: Final = "PLAIN"
SCRAM_SHA_256: Final = "SCRAM-SHA-256"
SCRAM_SHA_512: Final = "SCRAM-SHA-512"
MECHANISMS: Final = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512)
MAX_CONTEXTS: Final = 16


@dataclass(slots=True, frozen=True)
class Tls:
    """TLS to the brokers. Without `ca_file` the system's authorities are trusted.

    `cert_file` and `key_file` are the client's own, where the broker asks for them. `verify` False takes any
    certificate: whoever sits between can then read and change everything.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify: bool = True
    check_hostname: bool = True


@dataclass(slots=True, frozen=True)
class Sasl:
    """A name and a password, and how they are proved. PLAIN sends the password: use it with TLS only."""

    username: str
    password: str = field(repr=False)
    mechanism: str = SCRAM_SHA_512

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ConfigError(f"SASL mechanism {self.mechanism!r} is none of {', '.join(MECHANISMS)}")
        if not self.username or "\0" in self.username + self.password:
            raise ConfigError("a SASL username has at least one character, and none of it is NUL")


@lru_cache(maxsize=MAX_CONTEXTS)
def tls_context(tls: Tls) -> ssl.SSLContext:
    """The context for these options; files are read once."""
    for name, path in (("ca_file", tls.ca_file), ("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"TLS {name} {path!r} is no file that can be read")
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file, tls.key_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"the TLS files cannot be used: {error}") from error
    context.check_hostname = tls.verify and tls.check_hostname
    if not tls.verify:
        context.verify_mode = ssl.CERT_NONE
    return context
