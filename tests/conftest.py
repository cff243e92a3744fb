"""What all tests share."""

import signal

# A shell that starts a command in the background lets it ignore SIGINT, and children inherit that. Tests that
# interrupt a process must not depend on how they were started.
signal.signal(signal.SIGINT, signal.default_int_handler)
