"""A small asyncio Kafka client on `semel.wire`; it talks to Semel and to any Kafka from 2.x on."""
