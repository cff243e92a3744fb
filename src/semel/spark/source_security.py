"""TLS and SASL for the reader, from the options of Kafka's Java clients, which Spark's own source takes.

So what works with the one works with the other. Java's key stores are not read: certificates must be PEM
files (`kafka.ssl.truststore.type=PEM`), which Java's clients take as well.
"""

import re
from collections.abc import Mapping
from typing import Final

from semel.client.security import Sasl, Tls
from semel.errors import ConfigError

PROTOCOL: Final = "kafka.security.protocol"
MECHANISM: Final = "kafka.sasl.mechanism"
JAAS: Final = "kafka.sasl.jaas.config"
TRUST_TYPE: Final = "kafka.ssl.truststore.type"
TRUST_FILE: Final = "kafka.ssl.truststore.location"
KEY_TYPE: Final = "kafka.ssl.keystore.type"
KEY_FILE: Final = "kafka.ssl.keystore.location"
KEY_PASSWORD: Final = "kafka.ssl.key.password"
HOSTNAME_CHECK: Final = "kafka.ssl.endpoint.identification.algorithm"

SECURITY_OPTIONS: Final = (
    PROTOCOL,
    MECHANISM,
    JAAS,
    TRUST_TYPE,
    TRUST_FILE,
    KEY_TYPE,
    KEY_FILE,
    KEY_PASSWORD,
    HOSTNAME_CHECK,
)

# Protocol: whether it has TLS, whether it has SASL.
PROTOCOLS: Final = {
    "PLAINTEXT": (False, False),
    "SSL": (True, False),
    "SASL_PLAINTEXT": (False, True),
    "SASL_SSL": (True, True),
}
PEM: Final = "PEM"
JAAS_FIELD: Final = re.compile(r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""")


def read_security(options: Mapping[str, str]) -> tuple[Tls | None, Sasl | None]:
    """What these options ask for; ConfigError where it cannot be had."""
    protocol = options.get(PROTOCOL, "PLAINTEXT").upper()
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{PROTOCOL} is {protocol!r}: it must be one of {', '.join(PROTOCOLS)}")
    has_tls, has_sasl = PROTOCOLS[protocol]
    return (_tls(options) if has_tls else None), (_sasl(options) if has_sasl else None)


def _tls(options: Mapping[str, str]) -> Tls:
    for file, kind in ((TRUST_FILE, TRUST_TYPE), (KEY_FILE, KEY_TYPE)):
        if file in options and options.get(kind, "JKS").upper() != PEM:
            raise ConfigError(
                f"{file} must be a PEM file, with {kind}=PEM: the reader in Python reads no other key stores"
            )
    return Tls(
        ca_file=options.get(TRUST_FILE),
        cert_file=options.get(KEY_FILE),
        key_password=options.get(KEY_PASSWORD),
        # Java's way to say that names need not match: no algorithm.
        check_hostname=options.get(HOSTNAME_CHECK, "https") != "",
    )


def _sasl(options: Mapping[str, str]) -> Sasl:
    fields = {
        name: re.sub(r"\\(.)", r"\1", double or single)
        for name, double, single in JAAS_FIELD.findall(options.get(JAAS, ""))
    }
    if "username" not in fields or "password" not in fields:
        raise ConfigError(
            f'{JAAS} must have a name and a password: ... required username="NAME" password="PASSWORD";'
        )
    return Sasl(fields["username"], fields["password"], options.get(MECHANISM, "").upper())
