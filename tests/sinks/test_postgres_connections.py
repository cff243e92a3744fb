"""Whatever the server, the role or the connection string asks for: what a sink's connection insists on."""

from __future__ import annotations

from semel.sinks.postgres import PostgresSink
from semel.testing.postgres_server import PostgresServer

# Text


async def test_text_is_what_was_written_whatever_encoding_the_dsn_asks_for(postgres: PostgresServer) -> None:
    text = "zażółć é 😀"
    postgres.query("CREATE TABLE kept (value text)")
    async with PostgresSink(f"{postgres.dsn} client_encoding=latin1", "kept") as sink:
        await sink.open("s")
        await sink.begin(0)
        writer = sink.writer()
        await writer.write([{"value": text}])
        await sink.commit(0, [await writer.finish()])
    assert postgres.query("SELECT value FROM kept") == [(text,)]
