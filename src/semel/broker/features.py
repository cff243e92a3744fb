"""UpdateFeatures (57), and the features that there are, each at its highest level, always.

`transaction.version` is 2 (KIP-890), `group.version` 1 (KIP-848). A client that does not know these says so
by the requests that it sends, so there is nothing to lower.
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

FEATURES: Final = {
    # Clients that know it let the epoch be raised at every end of a transaction.
    "transaction.version": 2,
    # The consumer protocol is served. Clients go by its API; tools show the feature.
    "group.version": 1,
}
"""The level of each feature."""

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
    level = FEATURES.get(update.feature)
    if level is None:
        raise Refused(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"there is no feature '{update.feature}' here, only {' and '.join(FEATURES)}",
        )
    if update.max_version_level != level:
        raise Refused(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"{update.feature} is {level} and stays so, not {update.max_version_level}; "
            "older clients use what they know without being told to",
        )
