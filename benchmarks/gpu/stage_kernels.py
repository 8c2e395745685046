"""Stages of one operator: its cases against the truth, and their time against the roofline."""

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
    """One case that ran, and its error."""

    name: str
    error: float
    tolerance: float


def operators() -> list[str]:
    """Every folder in `kernels/`."""
    return sorted(found.name for found in pkgutil.iter_modules(kernels.__path__) if found.ispkg)


def load_cases(operator: str, size: CaseSize, device: torch.device) -> list[Case] | None:
    """What the operator's cases.py gives, None where there is none."""
    if not (files("kernels") / operator / "cases.py").is_file():
        return None
    cases: list[Case] = importlib.import_module(f"kernels.{operator}.cases").cases(size, device)
    return cases


def check(operator: str, options: Options, emit: Emit) -> None:
    """Emit the error of every case, and a row for the operator, which fails without a case."""
    cases = _cases(operator, options)
    if cases is None:
        emit(Row(operator, operator, Status.FAIL, f"kernels/{operator} has no cases.py"))
        return
    found: list[Found] = []
    for case in cases:
        try:
            with torch.inference_mode():
                error = relative_error(case.run(), case.truth())
        except Exception as fault:
            emit(error_row(operator, _name(case), fault))
            if _context_is_lost(options):
                break
            continue
        found.append(Found(_name(case), error, case.tolerance))
        emit(_error_row(operator, case, error))
        _free(options)
    emit(_worst(operator, len(cases), found))


def measure(operator: str, options: Options, emit: Emit) -> None:
    """Emit the time of every case as a share of the roofline, and the least and largest share."""
    cases, machine = _cases(operator, options) or [], options.machine
    if machine is None:
        text = "no roofline without the measured limits of stage card"
        emit(Row(operator, f"{operator} speed", Status.SKIP, text))
        return
    shares: list[float] = []
    # The interpreter's times mean nothing: one is enough to see that timing works.
    for case in cases[:1] if options.smoke else cases:
        try:
            with torch.inference_mode():
                device = torch.device(options.device)
                seconds = median_seconds(case.step, device, smoke=options.smoke)
        except Exception as fault:
            emit(error_row(operator, f"{_name(case)} speed", fault))
            if _context_is_lost(options):
                break
            continue
        shares.append(roofline_seconds(case, machine) / seconds)
        emit(_speed_row(operator, case, seconds, shares[-1]))
        _free(options)
    if shares:
        text = f"{min(shares):.0%} to {max(shares):.0%} of the roofline in {len(shares)} cases"
        emit(Row(operator, f"{operator} speed", Status.INFO, text, brief=not options.smoke))


def roofline_seconds(case: Case, machine: Machine) -> float:
    """The longer of the times that its bytes and its arithmetic take at the measured limits."""
    return max(case.bytes / machine.bandwidth, case.flops / machine.rate)


def _cases(operator: str, options: Options) -> list[Case] | None:
    size = CaseSize.SMOKE if options.smoke else CaseSize.CARD
    return load_cases(operator, size, torch.device(options.device))


def _error_row(operator: str, case: Case, error: float) -> Row:
    return Row(
        operator,
        _name(case),
        verdict(error <= case.tolerance),
        f"error {error:.1e} of {case.tolerance:.0e}",
        {"error": error, "tolerance": case.tolerance},
        brief=False,
    )


def _speed_row(operator: str, case: Case, seconds: float, share: float) -> Row:
    return Row(
        operator,
        f"{_name(case)} speed",
        Status.INFO,
        f"{seconds * 1e6:,.1f} us, {share:.0%} of the roofline",
        {"seconds": seconds, "roofline_share": share, "bytes": case.bytes, "flops": case.flops},
        brief=False,
    )


def _worst(operator: str, count: int, found: list[Found]) -> Row:
    if not count:
        return Row(operator, operator, Status.FAIL, f"kernels/{operator}/cases.py gives no case")
    if not found:
        return Row(operator, operator, Status.FAIL, f"none of {count} cases ran")
    worst = max(found, key=lambda one: one.error / one.tolerance)
    return Row(
        operator,
        operator,
        verdict(len(found) == count and worst.error <= worst.tolerance),
        f"{len(found)} of {count} cases, worst error {worst.error:.1e} of {worst.tolerance:.0e}",
        {"cases": count, "ran": len(found), "worst_error": worst.error, "worst": worst.name},
    )


def _name(case: Case) -> str:
    return f"{case.name} {str(case.dtype).removeprefix('torch.')}"


def _free(options: Options) -> None:
    """Cases of whole layers take gigabytes."""
    if options.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _context_is_lost(options: Options) -> bool:
    """After an illegal access every further call on the card fails."""
    if options.device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
