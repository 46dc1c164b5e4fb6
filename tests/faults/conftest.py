"""Prints the table of the fault runs where some of them have run."""

from __future__ import annotations

import time

import pytest

from tests.faults.results import recorded, table

_BEGUN = time.time()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = recorded(since=_BEGUN)
    if lines:
        terminalreporter.write_sep("=", "faults")
        terminalreporter.write_line(table(lines))
