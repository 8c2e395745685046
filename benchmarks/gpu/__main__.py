"""`python -m benchmarks.gpu`, the same as `scripts/gpu_check`."""

from __future__ import annotations

import sys

from benchmarks.gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
