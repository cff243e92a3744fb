"""The settings and limits of consumer groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 300_000
"""How long a member that has not been told its id yet may wait for a rebalance to finish; it then joins
again.
"""
MAX_MEMBER_METADATA_BYTES: Final = 8 * 1024 * 1024
"""Metadata that one member may join with, over all its protocols."""
MAX_GROUP_METADATA_BYTES: Final = 64 * 1024 * 1024
"""Metadata of all members of a group."""
MAX_ASSIGNMENT_BYTES: Final = 64 * 1024 * 1024
"""What a leader may assign at once; with the metadata it must fit into one journal group."""
MAX_GROUPS: Final = 200_000
"""Groups that this broker holds; joining or committing for another one is refused."""


@dataclass(slots=True, frozen=True)
class GroupSettings:
    """What the settings of the broker say about groups."""

    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 0
    max_size: int = 10_000
    max_offset_metadata_chars: int = 4_096
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 3_000
    offsets_retention_ms: int = 10_080 * 60_000
    retention_check_interval_ms: int = 600_000
