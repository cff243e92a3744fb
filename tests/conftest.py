"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from row_checks import ROWS_DIFFER_CODE, RowsDiffer

# A shell that starts a command in the background lets it ignore SIGINT, and children inherit that. Tests that
# interrupt a process must not depend on how they were started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, and its making, says how busy the machine is.
settings.register_profile("semel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("semel")

# Tests that have seen rows lost or doubled: the run fails for good, with an exit code that says so.
WITH_OTHER_ROWS = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None and call.excinfo.errisinstance(RowsDiffer):
        item.config.stash.setdefault(WITH_OTHER_ROWS, []).append(item.nodeid)
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for test in config.stash.get(WITH_OTHER_ROWS, []):
        terminalreporter.write_line(f"ROWS LOST OR DOUBLED {test}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(WITH_OTHER_ROWS, []):
        session.exitstatus = ROWS_DIFFER_CODE
