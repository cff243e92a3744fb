"""How long a delivery waits after it failed: twice as long each time, up to a limit, and spread."""

from dataclasses import dataclass

from semel.errors import ConfigError


@dataclass(slots=True, frozen=True)
class RedeliveryBackoff:
    """Pauses before the second, third, ... attempt. `jitter` 0.2 spreads each by a fifth to either side."""

    first_ms: int = 200
    max_ms: int = 60_000
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.first_ms <= self.max_ms and 0 <= self.jitter <= 1):
            raise ConfigError(
                f"the back-off {self} makes no sense: 0 <= first_ms <= max_ms and 0 <= jitter <= 1"
            )

    def delay_ms(self, attempts: int, spread: float) -> int:
        """The pause after so many failures; `spread` is a random number from 0 to 1."""
        doublings = min(attempts - 1, 32)
        pause_ms = min(self.first_ms << doublings, self.max_ms)
        return int(pause_ms * (1 - self.jitter + 2 * self.jitter * spread))
