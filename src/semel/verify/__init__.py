"""An exactly-once checker for any broker that speaks the Kafka protocol."""
