"""One event is one line, and what one test sets up of it no other one meets."""

from __future__ import annotations

import logging

import pytest

from spark_server.logging import ACCESS_LOGGER, OWN_LOGGERS, OneLineFormatter, setup_logging
from tests.conftest import logging_restored


def test_control_characters_cannot_forge_a_line() -> None:
    text = "id \r\n12:00:00 info forged \x1b[31m \x00 é 你"
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (text,), None)
    line = OneLineFormatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(r"id \r\n12:00:00 info forged \x1b[31m \x00 é 你")


def test_what_a_test_sets_up_ends_with_it(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    names = ("", *OWN_LOGGERS, ACCESS_LOGGER)
    before = root.handlers[:], [logging.getLogger(name).level for name in names]
    with logging_restored():
        setup_logging("error", access_log=True)
        assert root.handlers[:] != before[0]
        assert logging.getLogger("engine").level == logging.ERROR
    assert (root.handlers[:], [logging.getLogger(name).level for name in names]) == before
    with caplog.at_level(logging.INFO):
        logging.getLogger("engine.build").info("seen")
    assert caplog.messages == ["seen"]
