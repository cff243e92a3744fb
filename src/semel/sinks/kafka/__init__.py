"""The Kafka sink: one shared transaction an epoch, on Semel or on Apache Kafka."""

from semel.sinks.kafka.rows import RecordLayout
from semel.sinks.kafka.sink import KafkaSink
from semel.sinks.kafka.writer import KafkaPlan, KafkaWriter

__all__ = ["KafkaPlan", "KafkaSink", "KafkaWriter", "RecordLayout"]
