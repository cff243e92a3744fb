"""For those who test with Semel, and for those who test Semel."""
