"""What a run of the check was asked for, and what it learnt about the machine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits: bytes/s of a copy (read and written), FLOP/s of a bfloat16 product."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run.

    Attributes:
        device: `cuda` or `cpu`.
        smoke: small shapes and few steps, to see that everything runs.
        out: folder of the JSON file.
        seconds: for the whole run.
        stages: names to run, empty for all.
        acceptance: chance that a draft is made to come true.
        kernels: operators of the engine stages, as the server names them.
        capability: compile for cards of this compute capability, e.g. 90, and do nothing else.
        machine: measured limits, None until the first stage is done.
    """

    device: str = "cuda"
    smoke: bool = False
    out: Path = Path("gpu_check_out")
    seconds: float = 290.0
    stages: tuple[str, ...] = ()
    acceptance: float = 0.8
    kernels: str = "triton"
    capability: int | None = None
    machine: Machine | None = None
