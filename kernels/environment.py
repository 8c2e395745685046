"""What Triton reads from the environment, set alike by whoever compiles our kernels.

Imports nothing heavy, so that it can come before Triton.
"""

from __future__ import annotations

import os

# Whether a product and a sum may round once. Triton 3.9 warns where nobody says so and 3.10 stops
# doing it, which would give a server other bits than those that gpu_check compared.
TRITON_DEFAULTS = {"TRITON_DEFAULT_FP_FUSION": "1"}


def set_triton_defaults() -> None:
    """Say how kernels are compiled in this process, unless the environment does; before any is."""
    for name, value in TRITON_DEFAULTS.items():
        os.environ.setdefault(name, value)
