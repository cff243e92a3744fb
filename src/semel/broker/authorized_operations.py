"""Authorized operations: what a client may do with a topic, a group or the cluster, where it asks (KIP-430).

Nobody is kept from anything here, so that is all that can be done with each of them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class AclOperation(IntEnum):
    """Kafka's numbers for what can be allowed."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _bits(*operations: AclOperation) -> int:
    return sum(1 << operation for operation in operations)


_ON_CONFIGS: Final = _bits(AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS)

NOT_ASKED: Final = -(2**31)
ON_TOPIC: Final = _ON_CONFIGS | _bits(
    AclOperation.READ,
    AclOperation.WRITE,
    AclOperation.CREATE,
    AclOperation.DELETE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
)
ON_GROUP: Final = _ON_CONFIGS | _bits(AclOperation.READ, AclOperation.DELETE, AclOperation.DESCRIBE)
ON_CLUSTER: Final = _ON_CONFIGS | _bits(
    AclOperation.CREATE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
    AclOperation.CLUSTER_ACTION,
    AclOperation.IDEMPOTENT_WRITE,
)
