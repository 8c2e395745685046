"""What every test runs under: one thread per process for torch, also in processes of the tests."""

from __future__ import annotations

import os

# Before anything imports torch; set here and not through torch, which many tests never load.
os.environ.setdefault("OMP_NUM_THREADS", "1")
