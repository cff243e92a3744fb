"""What all tests share."""

import signal

from hypothesis import HealthCheck, settings

# A shell that starts a command in the background lets it ignore SIGINT, and children inherit that. Tests that
# interrupt a process must not depend on how they were started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, and its making, says how busy the machine is.
settings.register_profile("semel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("semel")
