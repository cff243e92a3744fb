"""Who this broker is: a cluster id made once, kept with the data."""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from pathlib import Path

from semel.broker.core import Identity
from semel.disk import Disk, write_fully
from semel.errors import ConfigError, CorruptionError

_MAX_BYTES = 4096


def new_cluster_id() -> str:
    return urlsafe_b64encode(os.urandom(16)).decode("ascii").rstrip("=")


def load_identity(disk: Disk, path: Path, node_id: int) -> Identity:
    """The identity in `path`, which is made if this is the first start."""
    if not disk.exists(path):
        identity = Identity(new_cluster_id(), node_id)
        _save(disk, path, identity)
        return identity
    file = disk.open(path)
    try:
        lines = file.pread(_MAX_BYTES, 0).decode("utf-8", "replace").splitlines()
    finally:
        file.close()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    if "cluster.id" not in values or "node.id" not in values:
        raise CorruptionError(f"{path} does not say which cluster this is; restore it from a backup")
    if values["node.id"] != str(node_id):
        raise ConfigError(
            f"{path.parent} belongs to node {values['node.id']}, and node.id is {node_id}; "
            "set node.id, or take another directory"
        )
    return Identity(values["cluster.id"], node_id)


def _save(disk: Disk, path: Path, identity: Identity) -> None:
    temporary = path.with_name(path.name + ".new")
    if disk.exists(temporary):
        disk.unlink(temporary)
    file = disk.create(temporary)
    try:
        write_fully(file, [f"cluster.id={identity.cluster_id}\nnode.id={identity.node_id}\n".encode()], 0)
        file.fdatasync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.fsync_dir(path.parent)
