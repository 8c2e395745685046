"""Fresh Python processes for tests; knows nothing of what they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(code: str, cwd: Path, *, seconds: float = 60, **env: str) -> str:
    """Run `code` with warnings as errors in a process of its own and return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
