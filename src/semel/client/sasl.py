"""The client's side of a SASL exchange, without I/O: it gives what to send and takes what came.

PLAIN sends name and password in one step. SCRAM (RFC 5802) proves the password without sending it, and asks
the same of the broker: a broker that cannot sign the exchange does not know the password, and is refused.
"""

import hashlib
import hmac
import secrets
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from typing import Final

from semel.client.security import PLAIN, SCRAM_SHA_256, Sasl
from semel.errors import ProtocolError

NONCE_BYTES: Final = 24
# Fewer make guessing cheap; more make a broker's answer an attack on this client.
MIN_ITERATIONS: Final = 4_096
MAX_ITERATIONS: Final = 1_000_000
# No channel binding ("n,,"), as base64.
NO_BINDING: Final = "biws"


class Exchange(ABC):
    """One attempt at authentication."""

    @abstractmethod
    def first(self) -> bytes:
        """What the client begins with."""

    @abstractmethod
    def next(self, answer: bytes) -> bytes | None:
        """What follows an answer; None when the exchange is complete and the broker is who it should be."""


class PlainExchange(Exchange):
    def __init__(self, sasl: Sasl) -> None:
        self._sasl = sasl

    def first(self) -> bytes:
        return f"\0{self._sasl.username}\0{self._sasl.password}".encode()

    def next(self, answer: bytes) -> bytes | None:
        return None


class ScramExchange(Exchange):
    def __init__(self, sasl: Sasl, nonce: str | None = None) -> None:
        self._hash = "sha256" if sasl.mechanism == SCRAM_SHA_256 else "sha512"
        self._password = sasl.password.encode()
        self._nonce = nonce or secrets.token_urlsafe(NONCE_BYTES)
        name = sasl.username.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={name},r={self._nonce}"
        self._server_signature: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def next(self, answer: bytes) -> bytes | None:
        if self._server_signature is None:
            return self._prove(answer)
        fields = _fields(answer)
        if not hmac.compare_digest(_base64(fields, "v"), self._server_signature):
            raise ProtocolError(
                "the broker did not prove that it knows the password: it is not the one meant"
            )
        return None

    def _prove(self, answer: bytes) -> bytes:
        fields = _fields(answer)
        nonce, salt, iterations = fields.get("r", ""), _base64(fields, "s"), fields.get("i", "")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ProtocolError("the broker's SCRAM nonce does not go on from ours")
        if not iterations.isdecimal() or not MIN_ITERATIONS <= int(iterations) <= MAX_ITERATIONS:
            raise ProtocolError(
                f"the broker asks for {iterations[:20]!r} SCRAM iterations; {MIN_ITERATIONS} to "
                f"{MAX_ITERATIONS} are taken"
            )
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, int(iterations))
        final_bare = f"c={NO_BINDING},r={nonce}"
        signed = f"{self._first_bare},{answer.decode()},{final_bare}".encode()
        client_key = self._hmac(salted, b"Client Key")
        stored_key = hashlib.new(self._hash, client_key).digest()
        signature = self._hmac(stored_key, signed)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        return f"{final_bare},p={b64encode(proof).decode()}".encode()

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)


def exchange_of(sasl: Sasl) -> Exchange:
    return PlainExchange(sasl) if sasl.mechanism == PLAIN else ScramExchange(sasl)


def _fields(answer: bytes) -> dict[str, str]:
    """`a=...,b=...` by letter."""
    try:
        parts = [part.partition("=") for part in answer.decode().split(",")]
    except UnicodeDecodeError as error:
        raise ProtocolError("the broker's SCRAM message is no text") from error
    return {name: value for name, _, value in parts}


def _base64(fields: dict[str, str], name: str) -> bytes:
    try:
        return b64decode(fields[name], validate=True)
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"the broker's SCRAM message has no valid field {name!r}") from error
