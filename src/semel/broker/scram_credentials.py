"""DescribeUserScramCredentials (50), AlterUserScramCredentials (51): no user has a password here.

Tools that describe users ask for quotas and for credentials, so "none" has to be a proper answer.
"""

from __future__ import annotations

from collections import Counter

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.wire.errors import ErrorCode
from semel.wire.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)
from semel.wire.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)


def describe_user_scram_credentials(
    broker: Broker, request: DescribeUserScramCredentialsRequest, caller: Caller, now: Now
) -> Decision:
    named = Counter(user.name for user in request.users or ())
    results = [_described(user, times) for user, times in named.items()]
    return Decision(DescribeUserScramCredentialsResponse(results=results))


def _described(user: str, times: int) -> DescribeUserScramCredentialsResult:
    if times > 1:
        return DescribeUserScramCredentialsResult(
            user=user,
            error_code=ErrorCode.DUPLICATE_RESOURCE,
            error_message=f"user '{user}' is named {times} times in one request",
        )
    return DescribeUserScramCredentialsResult(
        user=user,
        error_code=ErrorCode.RESOURCE_NOT_FOUND,
        error_message=f"user '{user}' has no SCRAM credentials",
    )


def alter_user_scram_credentials(
    broker: Broker, request: AlterUserScramCredentialsRequest, caller: Caller, now: Now
) -> Decision:
    outcomes: dict[str, tuple[ErrorCode, str]] = {}
    for deletion in request.deletions:
        outcomes[deletion.name] = (
            ErrorCode.RESOURCE_NOT_FOUND,
            f"user '{deletion.name}' has no SCRAM credentials",
        )
    for upsertion in request.upsertions:
        outcomes[upsertion.name] = (
            ErrorCode.UNSUPPORTED_SASL_MECHANISM,
            "this broker asks nobody for a password; SCRAM credentials cannot be stored",
        )
    results = [
        AlterUserScramCredentialsResult(user=user, error_code=code, error_message=reason)
        for user, (code, reason) in outcomes.items()
    ]
    return Decision(AlterUserScramCredentialsResponse(results=results))
