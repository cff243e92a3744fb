"""Apache Kafka with a second listener that wants TLS and SASL, with certificates made for the test."""

from __future__ import annotations

import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from broker_process import free_port
from kafka_process import FORMAT_TIMEOUT_S, KafkaProcess, _java

from semel.client.cluster import Cluster
from semel.client.errors import check
from semel.wire.messages.create_acls import AclCreation, CreateAclsRequest, CreateAclsResponse

USERNAME: Final = "alice"
LIMITED: Final = "bob"
"""May do nothing but what `allow` grants."""
PASSWORD: Final = "a=secret"
SECURE_PROPERTIES: Final = """
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
    user_{username}="{password}" user_{limited}="{password}";
listener.name.secure.scram-sha-256.sasl.jaas.config=\
    org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.secure.scram-sha-512.sasl.jaas.config=\
    org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{username}
"""

# Kafka's numbers for what an ACL is about, and for what it allows.
TOPIC, GROUP, TRANSACTIONAL_ID = 2, 3, 5
READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS = 3, 4, 8, 10
LITERAL, ALLOW = 3, 3


async def allow(cluster: Cluster, kind: int, name: str, *operations: int) -> None:
    """Grants operations on a resource to the limited user."""
    creations = [
        AclCreation(
            resource_type=kind,
            resource_name=name,
            resource_pattern_type=LITERAL,
            principal=f"User:{LIMITED}",
            host="*",
            operation=operation,
            permission_type=ALLOW,
        )
        for operation in operations
    ]
    connection = await cluster.any_connection()
    response = await connection.request(CreateAclsRequest(creations=creations), CreateAclsResponse)
    for result in response.results:
        check(result.error_code, "the ACL was not created", result.error_message)


class SecureKafka(KafkaProcess):
    """One node with a plain listener and a secure one; `ca_file` is who signed its certificate."""

    def __init__(self, directory: Path) -> None:
        self.secure_port = free_port()
        self.ca_file = directory / "certificate.pem"
        super().__init__(directory)

    @property
    def secure_bootstrap(self) -> str:
        return f"127.0.0.1:{self.secure_port}"

    def _format(self) -> None:
        keystore = self._make_certificate()
        text = self._properties.read_text()
        for name in ("listeners=", "advertised.listeners="):
            text = text.replace(f"\n{name}", f"\n{name}SECURE://127.0.0.1:{self.secure_port},", 1)
        text += SECURE_PROPERTIES.format(
            username=USERNAME, limited=LIMITED, password=PASSWORD, keystore=keystore
        )
        self._properties.write_text(text)
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        users = [
            f'--add-scram={mechanism}=[name="{USERNAME}",password="{PASSWORD}"]'
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
        ]
        done = subprocess.run(
            _java("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._properties), *users),
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _make_certificate(self) -> Path:
        key = self.directory / "key.pem"
        names = "subjectAltName=IP:127.0.0.1"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=broker"]
        command += ["-addext", names, "-keyout", str(key), "-out", str(self.ca_file)]
        subprocess.run(command, check=True, capture_output=True, timeout=FORMAT_TIMEOUT_S)
        keystore = self.directory / "keystore.pem"
        keystore.write_text(key.read_text() + self.ca_file.read_text())
        return keystore
