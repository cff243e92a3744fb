"""The PostgreSQL of the tests, as fixtures."""

from collections.abc import Iterator

import pytest

from semel.testing.postgres_server import PostgresServer, find_binaries


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[PostgresServer]:
    """The cluster that tests share; those that kill it start it again."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer(binaries)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres(postgres_cluster: PostgresServer) -> PostgresServer:
    """The shared cluster, with nothing in it."""
    postgres_cluster.query("DROP SCHEMA public CASCADE")
    postgres_cluster.query("CREATE SCHEMA public")
    postgres_cluster.query("GRANT ALL ON SCHEMA public TO public")
    return postgres_cluster
