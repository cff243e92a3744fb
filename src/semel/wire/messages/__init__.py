"""Kafka's messages, one module an API. Generated: see tools/generate_wire.py."""
