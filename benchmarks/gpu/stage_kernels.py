"""Stage of one operator: each of its cases against the truth, and its time against the roofline."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from dataclasses import dataclass
from importlib.resources import files

import torch

import kernels
from benchmarks.gpu.options import Machine, Options
from benchmarks.gpu.rows import Row, Status, error_row, verdict
from benchmarks.gpu.runner import Emit
from benchmarks.gpu.timing import median_seconds
from kernels.cases import Case, CaseSize, relative_error


@dataclass(frozen=True, slots=True)
class Found:
    """One case that ran: its error, and its share of the roofline where it was timed."""

    name: str
    error: float
    tolerance: float
    share: float | None


def operators() -> list[str]:
    """Every folder in `kernels/`."""
    return sorted(found.name for found in pkgutil.iter_modules(kernels.__path__) if found.ispkg)


def load_cases(operator: str, size: CaseSize, device: torch.device) -> list[Case] | None:
    """What the operator's cases.py gives, None where there is none."""
    if not (files("kernels") / operator / "cases.py").is_file():
        return None
    cases: list[Case] = importlib.import_module(f"kernels.{operator}.cases").cases(size, device)
    return cases


def run(operator: str, options: Options, emit: Emit) -> None:
    """Emit a row per case and one for the operator, which fails without a case."""
    size = CaseSize.SMOKE if options.smoke else CaseSize.CARD
    device = torch.device(options.device)
    cases = load_cases(operator, size, device)
    if cases is None:
        emit(Row(operator, operator, Status.FAIL, f"kernels/{operator} has no cases.py"))
        return
    found: list[Found] = []
    for number, case in enumerate(cases):
        try:
            # The interpreter's times mean nothing: one is enough to see that timing works.
            one = check_case(case, options, timed=number == 0 or not options.smoke)
        except Exception as error:
            emit(error_row(operator, f"{case.name} {_dtype(case)}", error))
            if _context_is_lost(device):
                break
            continue
        found.append(one)
        emit(_case_row(operator, case, one, options))
        if device.type == "cuda":
            gc.collect()
    emit(_summary(operator, len(cases), found, options))


def check_case(case: Case, options: Options, *, timed: bool) -> Found:
    """Run a case against its truth, and time it where a roofline was measured."""
    with torch.inference_mode():
        error = relative_error(case.run(), case.truth())
        share = None
        if timed and options.machine is not None:
            seconds = median_seconds(case.step, torch.device(options.device))
            share = roofline_seconds(case, options.machine) / seconds
    return Found(case.name, error, case.tolerance, share)


def roofline_seconds(case: Case, machine: Machine) -> float:
    """The longer of the times that its bytes and its arithmetic take at the measured limits."""
    return max(case.bytes / machine.bandwidth, case.flops / machine.rate)


def _case_row(operator: str, case: Case, found: Found, options: Options) -> Row:
    timed = found.share is not None and not options.smoke
    share = f", {found.share:.0%} of the roofline" if timed else ""
    return Row(
        operator,
        f"{case.name} {_dtype(case)}",
        verdict(found.error <= found.tolerance),
        f"error {found.error:.1e} of {found.tolerance:.0e}{share}",
        {
            "error": found.error,
            "tolerance": found.tolerance,
            "roofline_share": found.share,
            "bytes": case.bytes,
            "flops": case.flops,
        },
        brief=False,
    )


def _summary(operator: str, count: int, found: list[Found], options: Options) -> Row:
    if not count:
        return Row(operator, operator, Status.FAIL, f"kernels/{operator}/cases.py gives no case")
    if not found:
        return Row(operator, operator, Status.FAIL, f"none of {count} cases ran")
    worst = max(found, key=lambda one: one.error / one.tolerance)
    shares = [one.share for one in found if one.share is not None]
    timed = shares and not options.smoke
    speed = f", {min(shares):.0%} to {max(shares):.0%} of the roofline" if timed else ""
    return Row(
        operator,
        operator,
        verdict(len(found) == count and worst.error <= worst.tolerance),
        f"{len(found)} of {count} cases, worst error {worst.error:.1e} of "
        f"{worst.tolerance:.0e}{speed}",
        {"cases": count, "ran": len(found), "worst_error": worst.error, "worst": worst.name},
    )


def _dtype(case: Case) -> str:
    return str(case.dtype).removeprefix("torch.")


def _context_is_lost(device: torch.device) -> bool:
    """After an illegal access every further call on the card fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
