"""What the pytest plugin gives to whoever has Semel installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.embedded import Broker

seen_topics: set[str] = set()


async def test_a_topic_takes_records_and_gives_them_back(semel_broker: Broker, semel_topic: str) -> None:
    seen_topics.add(semel_topic)
    async with Cluster(semel_broker.bootstrap) as cluster:
        async with Producer(cluster) as producer:
            await producer.send(semel_topic, b"value", key=b"key")
        async with Consumer(cluster) as consumer:
            await consumer.assign([TopicPartition(semel_topic, 0)])
            batches = await consumer.poll(10_000)
    assert [(record.key, record.value) for batch in batches for record in batch.records()] == [
        (b"key", b"value")
    ]


async def test_the_topic_of_an_earlier_test_is_gone(semel_broker: Broker, semel_topic: str) -> None:
    async with Cluster(semel_broker.bootstrap) as cluster:
        partitions = {topic.name: len(topic.partitions) for topic in await Admin(cluster).list_topics()}
    assert partitions[semel_topic] == 1
    assert not partitions.keys() & seen_topics


def test_a_plain_test_has_a_topic_too(semel_topic: str) -> None:
    assert semel_topic.startswith("test-")


def test_the_broker_is_not_rewritten_by_pytest(tmp_path: Path) -> None:
    """In a process of its own: here its modules are loaded already."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(semel_topic):\n"
        "    modules = [module for name, module in sys.modules.items() if name.startswith('semel.server')]\n"
        "    assert modules\n"
        "    assert not [m for m in modules if 'rewrite' in type(m.__spec__.loader).__module__]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
