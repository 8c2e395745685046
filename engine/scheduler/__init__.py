"""Which rows run in each step, and who holds which slot and KV blocks. Knows no tensors."""

from engine.scheduler.admission import MAX_BYPASSES
from engine.scheduler.plan import StepKind, StepOutcome, StepPlan
from engine.scheduler.reuse import StatePort
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Phase, Sequence

__all__ = [
    "MAX_BYPASSES",
    "Phase",
    "Scheduler",
    "Sequence",
    "StatePort",
    "StepKind",
    "StepOutcome",
    "StepPlan",
]
