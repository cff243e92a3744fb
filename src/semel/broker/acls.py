"""DescribeAcls (29), CreateAcls (30), DeleteAcls (31): refused, since nobody is kept from anything here.

That is how Kafka answers without an authorizer, so tools say what is the matter and go on.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_acls import AclCreationResult, CreateAclsRequest, CreateAclsResponse
from semel.wire.messages.delete_acls import DeleteAclsFilterResult, DeleteAclsRequest, DeleteAclsResponse
from semel.wire.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse

_WHY: Final = "this broker has no authorizer: everybody may do everything, and there are no ACLs"


def describe_acls(broker: Broker, request: DescribeAclsRequest, caller: Caller, now: Now) -> Decision:
    return Decision(DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=_WHY))


def create_acls(broker: Broker, request: CreateAclsRequest, caller: Caller, now: Now) -> Decision:
    results = [
        AclCreationResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=_WHY)
        for _ in request.creations
    ]
    return Decision(CreateAclsResponse(results=results))


def delete_acls(broker: Broker, request: DeleteAclsRequest, caller: Caller, now: Now) -> Decision:
    results = [
        DeleteAclsFilterResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=_WHY)
        for _ in request.filters
    ]
    return Decision(DeleteAclsResponse(filter_results=results))
