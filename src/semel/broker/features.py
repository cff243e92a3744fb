"""UpdateFeatures (57), and the one feature that there is: `transaction.version` (KIP-890), always at 2.

A client that does not know version 2 says so by the versions of its requests, so there is nothing to lower.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.refusal import Refused
from semel.wire.errors import ErrorCode
from semel.wire.messages.update_features import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)

TRANSACTION_VERSION: Final = "transaction.version"
TRANSACTION_VERSION_2: Final = 2
"""Clients that know it let the epoch be raised at every end of a transaction."""

_ONE_ERROR_FROM: Final = 2
"""Since this version the first error stands for the whole request."""


def update_features(broker: Broker, request: UpdateFeaturesRequest, caller: Caller, now: Now) -> Decision:
    results = [_updated(update) for update in request.feature_updates]
    reply = UpdateFeaturesResponse(results=results)
    failed = next((result for result in results if result.error_code), None)
    if failed is not None and caller.api_version >= _ONE_ERROR_FROM:
        reply.error_code, reply.error_message = failed.error_code, failed.error_message
    return Decision(reply)


def _updated(update: FeatureUpdateKey) -> UpdatableFeatureResult:
    result = UpdatableFeatureResult(feature=update.feature)
    try:
        _check(update)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.reason
    return result


def _check(update: FeatureUpdateKey) -> None:
    if update.feature != TRANSACTION_VERSION:
        raise Refused(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"there is no feature '{update.feature}' here, only {TRANSACTION_VERSION}",
        )
    if update.max_version_level != TRANSACTION_VERSION_2:
        raise Refused(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{TRANSACTION_VERSION} is {TRANSACTION_VERSION_2} and stays so, not {update.max_version_level}; "
            "older clients use version 1 without being told to",
        )
