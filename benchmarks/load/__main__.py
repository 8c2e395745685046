"""`python -m benchmarks.load`, the same as `spark bench`."""

import sys

from benchmarks.load.cli import main

sys.exit(main())
