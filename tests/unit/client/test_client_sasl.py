"""SASL and TLS options, and the exchanges without I/O."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from semel.client.connection import ConnectionOptions
from semel.client.sasl import MAX_ITERATIONS, ScramExchange, exchange_of
from semel.client.security import PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, Sasl, Tls, tls_context
from semel.errors import ConfigError, ProtocolError

# The exchange of RFC 7677, section 3.
NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def example() -> ScramExchange:
    return ScramExchange(Sasl("user", "pencil", SCRAM_SHA_256), NONCE)


def test_plain_is_one_step() -> None:
    exchange = exchange_of(Sasl("alice", "secret", PLAIN))
    assert exchange.first() == b"\0alice\0secret"
    assert exchange.next(b"") is None


def test_scram_follows_the_example_of_its_rfc() -> None:
    exchange = example()
    assert exchange.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    assert exchange.next(SERVER_FIRST) == CLIENT_FINAL
    assert exchange.next(SERVER_FINAL) is None


def test_a_broker_that_does_not_know_the_password_is_refused() -> None:
    exchange = example()
    exchange.next(SERVER_FIRST)
    with pytest.raises(ProtocolError, match="did not prove that it knows the password"):
        exchange.next(SERVER_FINAL.replace(b"6rri", b"7rri"))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (SERVER_FIRST.replace(b"rOpr", b"xOpr"), "nonce does not go on from ours"),
        (f"r={NONCE},s=AAAA,i=4096".encode(), "nonce does not go on from ours"),
        (SERVER_FIRST.replace(b"i=4096", b"i=1"), "'1' SCRAM iterations"),
        (SERVER_FIRST.replace(b"i=4096", f"i={MAX_ITERATIONS + 1}".encode()), "SCRAM iterations"),
        (SERVER_FIRST.replace(b"i=4096", b"i=many"), "SCRAM iterations"),
        (SERVER_FIRST.replace(b"s=W22", b"s=*22"), "no valid field 's'"),
        (b"e=other-error", "no valid field 's'"),
        (b"\xff", "is no text"),
    ],
)
def test_a_server_message_that_is_wrong_is_refused(first: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        example().next(first)


def test_names_are_escaped_and_nonces_are_new_each_time() -> None:
    sasl = Sasl("a,b=c", "secret", SCRAM_SHA_512)
    first, second = exchange_of(sasl).first(), exchange_of(sasl).first()
    assert first.startswith(b"n,,n=a=2Cb=3Dc,r=")
    assert first != second


def test_options_travel_and_do_not_show_their_secrets() -> None:
    options = ConnectionOptions(
        tls=Tls(key_password="hidden"),
        sasl=Sasl("alice", "hidden"),
    )
    assert pickle.loads(pickle.dumps(options)) == options
    assert "hidden" not in repr(options)


@pytest.mark.parametrize("wrong", [("alice", "x", "GSSAPI"), ("", "x", PLAIN), ("a\0b", "x", PLAIN)])
def test_credentials_that_cannot_be_are_refused(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError):
        Sasl(*wrong)


def test_tls_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS ca_file 'nowhere' is no file"):
        tls_context(Tls(ca_file="nowhere"))
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match="the TLS files cannot be used"):
        tls_context(Tls(ca_file=str(wrong)))


def test_certificates_are_verified_unless_told_otherwise() -> None:
    assert tls_context(Tls()).check_hostname
    assert not tls_context(Tls(check_hostname=False)).check_hostname
    assert tls_context(Tls(check_hostname=False)).verify_mode.name == "CERT_REQUIRED"
    assert tls_context(Tls(verify=False)).verify_mode.name == "CERT_NONE"
