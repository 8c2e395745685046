"""What every test runs under: one torch thread per process, and log settings that end with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spark_server.logging import ACCESS_LOGGER, OWN_LOGGERS

# Before anything imports torch; set here and not through torch, which many tests never load.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def logging_restored() -> Iterator[None]:
    """Undo what `setup_logging` does to the loggers, which all tests of a process share."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    loggers = [root, *map(logging.getLogger, (*OWN_LOGGERS, ACCESS_LOGGER))]
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """A test that serves in this process leaves no other one without its log lines."""
    with logging_restored():
        yield
