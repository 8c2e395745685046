"""Log lines of both processes: one event is one line, whatever text it carries.

Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

OWN_LOGGERS = ("spark_server", "engine", "kernels")
ACCESS_LOGGER = "uvicorn.access"


class OneLineFormatter(logging.Formatter):
    """Escapes control characters, so that no client can forge a line or colour a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if not text.isprintable():
            text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {text}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def setup_logging(level: str, stream: TextIO | None = None, *, access_log: bool = False) -> None:
    """Send everything at `level` and above to stderr; libraries speak at warning and above."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if access_log else logging.WARNING)
