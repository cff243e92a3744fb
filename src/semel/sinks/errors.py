"""What can go wrong with a sink, sorted by what its caller may do about it.

| class | the epoch is | what the caller does |
|---|---|---|
| `InitFailed`, `MarkerMismatch` | not begun | mends the configuration, or adopts the marker |
| `BeginFailed` | not begun | begins again, or gives up |
| `WriteFailed` | spoiled | aborts; a row that cannot be written (`is_permanent`) fails each time |
| `CommitFailed` | certainly not committed | aborts, and runs the epoch again |
| `UnknownOutcome` | committed or not | opens anew, and the marker tells: never aborts |
| `AbortFailed` | never committed | opens anew, which aborts |
| `ConnectionLost` | not committed | aborts, and runs the epoch again |
| `FencedOut` | no longer ours | stops this process |
"""

from semel.errors import SemelError


class SinkError(SemelError):
    """A transactional sink failed; the subclass says what that means for the epoch."""


class InitFailed(SinkError):
    """The sink cannot be opened: its settings, the target or permissions are wrong. Nothing was written.

    `is_permanent` is False where it may pass by itself: a server that is away, an owner that is still there.
    """

    def __init__(self, message: str, *, is_permanent: bool = True) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class MarkerMismatch(SinkError):
    """The stored marker and the epoch that is asked for do not belong together. Nothing was written."""


class BeginFailed(SinkError):
    """No transaction could be begun, or the call does not fit: nothing is active, or another epoch is.

    Nothing was written.
    """


class WriteFailed(SinkError):
    """Rows could not be written; the epoch must be aborted.

    `is_permanent` says that the same rows would fail again: a wrong type, a broken constraint.
    """

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent

    def __reduce__(self) -> tuple[object, ...]:
        # Writers are in other processes: their errors are pickled on the way to the driver.
        return _revive_write_failure, (str(self), self.is_permanent)


class CommitFailed(SinkError):
    """The epoch is not committed, and never will be by this attempt: abort it and run it again."""

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class UnknownOutcome(SinkError):
    """Commit was sent and no answer came: only the next `open` can tell."""


class AbortFailed(SinkError):
    """The abort was not confirmed. What was written stays invisible; the next `open` removes it."""


class ConnectionLost(SinkError):
    """The server went away before commit was sent: abort and run the epoch again."""


class FencedOut(SinkError):
    """Another owner has taken this sink id. Final: an owner that reopens would fence its successor."""


def _revive_write_failure(message: str, is_permanent: bool) -> WriteFailed:
    return WriteFailed(message, is_permanent=is_permanent)
