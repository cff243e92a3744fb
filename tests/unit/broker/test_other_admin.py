"""Claims about what a broker without an authorizer, passwords and feature levels says when asked for them."""

from broker_cases import caller, new_broker, now, with_topic

from semel.broker.acls import create_acls, delete_acls, describe_acls
from semel.broker.alter_configs import Operation, incremental_alter_configs
from semel.broker.config_resources import list_config_resources
from semel.broker.features import update_features
from semel.broker.scram_credentials import alter_user_scram_credentials, describe_user_scram_credentials
from semel.wire.errors import ErrorCode
from semel.wire.messages import incremental_alter_configs as incremental
from semel.wire.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from semel.wire.messages.create_acls import AclCreation, CreateAclsRequest, CreateAclsResponse
from semel.wire.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest, DeleteAclsResponse
from semel.wire.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse
from semel.wire.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    UserName,
)
from semel.wire.messages.list_config_resources import (
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from semel.wire.messages.update_features import (
    FeatureUpdateKey,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)


def test_acls_are_refused_one_by_one_since_security_is_disabled() -> None:
    broker = new_broker()
    described = describe_acls(broker, DescribeAclsRequest(), caller(3), now()).reply
    assert isinstance(described, DescribeAclsResponse)
    assert described.error_code == ErrorCode.SECURITY_DISABLED
    created = create_acls(
        broker, CreateAclsRequest(creations=[AclCreation(), AclCreation()]), caller(3), now()
    ).reply
    assert isinstance(created, CreateAclsResponse)
    assert [result.error_code for result in created.results] == [ErrorCode.SECURITY_DISABLED] * 2
    deleted = delete_acls(broker, DeleteAclsRequest(filters=[DeleteAclsFilter()]), caller(3), now()).reply
    assert isinstance(deleted, DeleteAclsResponse)
    assert [result.error_code for result in deleted.filter_results] == [ErrorCode.SECURITY_DISABLED]


def scram(users: list[str] | None) -> list[tuple[str, int]]:
    named = None if users is None else [UserName(name=user) for user in users]
    reply = describe_user_scram_credentials(
        new_broker(), DescribeUserScramCredentialsRequest(users=named), caller(0), now()
    ).reply
    assert isinstance(reply, DescribeUserScramCredentialsResponse)
    assert reply.error_code == 0
    return [(result.user, result.error_code) for result in reply.results]


def test_no_user_has_scram_credentials() -> None:
    assert scram(None) == []
    assert scram(["ann", "bob", "bob"]) == [
        ("ann", ErrorCode.RESOURCE_NOT_FOUND),
        ("bob", ErrorCode.DUPLICATE_RESOURCE),
    ]


def test_scram_credentials_cannot_be_set_or_removed() -> None:
    request = AlterUserScramCredentialsRequest(
        deletions=[ScramCredentialDeletion(name="ann", mechanism=1)],
        upsertions=[ScramCredentialUpsertion(name="bob", mechanism=1, iterations=4096)],
    )
    reply = alter_user_scram_credentials(new_broker(), request, caller(0), now()).reply
    assert isinstance(reply, AlterUserScramCredentialsResponse)
    assert {result.user: result.error_code for result in reply.results} == {
        "ann": ErrorCode.RESOURCE_NOT_FOUND,
        "bob": ErrorCode.UNSUPPORTED_SASL_MECHANISM,
    }


def update(feature: str, level: int, version: int) -> UpdateFeaturesResponse:
    request = UpdateFeaturesRequest(
        feature_updates=[FeatureUpdateKey(feature=feature, max_version_level=level)]
    )
    reply = update_features(new_broker(), request, caller(version), now()).reply
    assert isinstance(reply, UpdateFeaturesResponse)
    return reply


def test_features_stay_at_their_highest_level() -> None:
    assert update("group.version", 1, 2).error_code == 0
    assert update("group.version", 0, 2).error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert update("transaction.version", 2, 2).error_code == 0
    assert update("transaction.version", 1, 2).error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert update("metadata.version", 20, 2).error_code == ErrorCode.INVALID_UPDATE_VERSION
    older = update("transaction.version", 0, 1)
    assert older.error_code == 0
    assert [result.error_code for result in older.results] == [ErrorCode.INVALID_UPDATE_VERSION]


def resources(version: int, *types: int) -> ListConfigResourcesResponse:
    request = ListConfigResourcesRequest(resource_types=list(types))
    reply = list_config_resources(with_topic(new_broker()), request, caller(version), now()).reply
    assert isinstance(reply, ListConfigResourcesResponse)
    return reply


def test_topics_and_the_broker_have_settings() -> None:
    found = [(each.resource_type, each.resource_name) for each in resources(1).config_resources]
    assert found == [(2, "t"), (4, "1")]
    assert [each.resource_name for each in resources(1, 4).config_resources] == ["1"]
    assert resources(1, 32, 16, 8).config_resources == []
    assert resources(1, 3).error_code == ErrorCode.UNSUPPORTED_VERSION
    assert resources(0).config_resources == [], "the first version asks for client metrics only"


def test_a_brokers_settings_can_be_taken_back_but_not_set() -> None:
    def alter(name: str, operation: Operation) -> int:
        change = incremental.AlterableConfig(name="num.io.threads", config_operation=operation, value="9")
        resource = incremental.AlterConfigsResource(resource_type=4, resource_name=name, configs=[change])
        request = incremental.IncrementalAlterConfigsRequest(resources=[resource])
        decision = incremental_alter_configs(new_broker(), request, caller(1), now())
        assert isinstance(decision.reply, incremental.IncrementalAlterConfigsResponse)
        assert decision.entries == []
        return decision.reply.responses[0].error_code

    assert [alter(name, Operation.DELETE) for name in ("1", "", "2")] == [0, 0, ErrorCode.INVALID_REQUEST]
    assert alter("1", Operation.SET) == ErrorCode.INVALID_REQUEST
