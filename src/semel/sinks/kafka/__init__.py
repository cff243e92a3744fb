"""The Kafka sink: one shared transaction an epoch, on Semel or on Apache Kafka."""

from semel.errors import missing_extra

try:
    from semel.sinks.kafka.rows import RecordLayout
    from semel.sinks.kafka.sink import KafkaSink
    from semel.sinks.kafka.writer import KafkaPlan, KafkaWriter
except ImportError as error:
    raise missing_extra("KafkaSink", "sinks", error) from error

__all__ = ["KafkaPlan", "KafkaSink", "KafkaWriter", "RecordLayout"]
