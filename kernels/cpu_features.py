"""What this CPU can multiply. Plans ask too: no numba and no torch here.

numba compiles for the same features; see its get_host_cpu_features.
"""

from __future__ import annotations

import os

from llvmlite.binding import get_host_cpu_features


def _features() -> set[str]:
    """What numba compiles for: its own variable's list, or all that the CPU has."""
    asked = os.environ.get("NUMBA_CPU_FEATURES")
    found = set((get_host_cpu_features().flatten() if asked is None else asked).split(","))
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        return {feature for feature in found if not feature.startswith("+avx")}
    return found


FEATURES = _features()
# Whether the CPU multiplies pairs of bfloat16.
BFLOAT16 = {"+avx512bf16", "+avx512f"} <= FEATURES
# Whether it multiplies fours of bytes.
BYTES = {"+avx512vnni", "+avx512f"} <= FEATURES
# Whether it multiplies tiles of bfloat16; a process must ask the system for their registers too.
TILES = {"+amx-bf16", "+amx-tile", "+avx512f"} <= FEATURES
# Whether it multiplies tiles of bytes.
BYTE_TILES = TILES and BYTES and "+amx-int8" in FEATURES
# A tile: rows, and bytes of each.
TILE_ROWS, TILE_ROW_BYTES = 16, 64
