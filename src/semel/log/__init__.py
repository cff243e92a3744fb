"""The pure state of one partition: no files, no clock, no randomness."""
