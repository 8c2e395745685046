"""One event is one line."""

from __future__ import annotations

import logging

from spark_server.logging import OneLineFormatter


def test_control_characters_cannot_forge_a_line() -> None:
    text = "id \r\n12:00:00 info forged \x1b[31m \x00 é 你"
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (text,), None)
    line = OneLineFormatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(r"id \r\n12:00:00 info forged \x1b[31m \x00 é 你")
