"""ACID subscriptions over gRPC, for every language; see docs/grpc.md. Needs the extra `grpc`."""

from importlib import import_module

from semel.errors import ConfigError, how_to_install


def require_extra() -> None:
    """Says what to install where the packages of gRPC are missing."""
    try:
        for package in ("grpc", "grpc_health", "grpc_reflection", "google.protobuf"):
            import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"the gRPC service needs packages that are not installed ({error}): {how_to_install('grpc')}"
        ) from error
