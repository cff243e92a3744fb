"""The Kafka protocol, sans I/O: primitives, messages, frames, record batches. One codec for both sides."""
