"""The state machines of the broker: what each request decides, and how state follows from the journal.

No I/O, no clock, no randomness: time and random bytes come in as arguments.
"""
