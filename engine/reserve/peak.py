"""The most memory that the engine held, against what the ledger planned; changes neither."""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.reserve.sizes import format_bytes
from engine.reserve.terms import BASELINE

# A new line says that the peak has risen by this part of the plan, so that no load writes many.
_STEP_PART = 64
_STATUS = Path("/proc/self/status")

logger = logging.getLogger(__name__)


def peak_resident() -> int:
    """Bytes that were resident at most so far, of this process alone."""
    # getrusage's maximum is not lower than what the parent held when it started this process.
    if _STATUS.is_file():
        (line,) = re.findall(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.M)
        return int(line) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_allocated() -> int:
    """Bytes of tensors that torch held at most so far on the card."""
    import torch

    return int(torch.cuda.max_memory_allocated())


class PeakMemory:
    """Reads the peak, and logs it beside the plan.

    On a card the reading is of tensors, so that the plan leaves the CUDA context out. On a CPU it
    is of the engine's own process; the one that compiles grammars is in the plan only.

    Args:
        terms: of the ledger, as its `as_dict` gives them.
        device: "cpu" or "cuda".
        read: the peak in bytes; by default that of the device.
    """

    def __init__(
        self,
        terms: Iterable[Mapping[str, Any]],
        device: str,
        read: Callable[[], int] | None = None,
    ) -> None:
        on_card = device == "cuda"
        self.read = read or (peak_allocated if on_card else peak_resident)
        self.planned = sum(
            int(term["bytes"]) for term in terms if not (on_card and term["name"] == BASELINE)
        )
        self._what = "of tensors" if on_card else "resident"
        self._said: int | None = None

    def say(self) -> None:
        """Log peak, plan and difference, unless the peak has hardly risen since the last line."""
        peak = self.read()
        above = peak > self.planned
        if self._said is not None:
            crossed = above and self._said <= self.planned
            if not crossed and peak - self._said < max(self.planned // _STEP_PART, 1):
                return
        self._said = peak
        logger.log(
            logging.WARNING if above else logging.INFO,
            "Peak memory: %s %s, %s planned, %s %s",
            format_bytes(peak),
            self._what,
            format_bytes(self.planned),
            format_bytes(abs(peak - self.planned)),
            "more" if above else "less",
        )
