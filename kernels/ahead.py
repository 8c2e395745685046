"""Compiles the CPU kernels in two processes where none is compiled yet, as at the first start.

numba compiles on one thread, half a minute in all, and keeps what it compiled on disk. So another
process compiles the slowest kernel while this one compiles the others; afterwards both are found
there. Run as a module it is that other process.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

from kernels.ops import cpu_ops
from kernels.selftest import SelfTest

logger = logging.getLogger(__name__)

_HERE = ("linear", "rms_norm", "silu_mul", "attention")
_GDN, _CHAIN = "gdn", "draft_chain"


def compile_kernels(*, drafts: bool) -> bool:
    """Compile what a model's steps need, if the slowest kernel is not there; whether it was not.

    With `drafts` also what a drafter needs. Whatever goes wrong over there is compiled at first
    use, as without this.
    """
    slowest = _CHAIN if drafts else _GDN
    if _there(slowest) or len(os.sched_getaffinity(0)) < 2:
        return False
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    # A pipe that nobody writes to: it closes when this process ends, and the other ends with it.
    with subprocess.Popen(
        [sys.executable, "-m", "kernels.ahead", slowest],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    ) as other:
        _run(*_HERE, *([_GDN] if drafts else []))
        assert other.stderr is not None
        said = other.stderr.read().decode(errors="replace").strip()
    if other.returncode:
        last = said.rpartition("\n")[2]
        logger.warning("Compiling %s beside the others failed: %s", slowest, last)
    return True


def _there(operator: str) -> bool:
    """Whether the operator's kernel was compiled since its file last changed."""
    from kernels.draft_chain.cpu import _chain
    from kernels.gdn.cpu import _mixer

    kernel = _chain if operator == _CHAIN else _mixer
    folder = Path(kernel.stats.cache_path)  # type: ignore[attr-defined]
    source = Path(sys.modules[kernel.__module__].__file__ or "").stat().st_mtime
    found = folder.glob(f"*{kernel.__name__}-*.nbi")
    return any(index.stat().st_mtime >= source for index in found)


def _run(*operators: str) -> None:
    test = SelfTest(cpu_ops(), torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        for operator in operators:
            test.run(operator)


def _end_with_parent() -> None:
    # The descriptor itself: Python's own object has a lock that its shutdown would wait for.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _run(*sys.argv[1:])
