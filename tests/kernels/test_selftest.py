"""The self-test of the operators finds what is wrong, and names who does what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops, cpu_ops, naive_ops
from kernels.selftest import OperatorResult, RowsResult, SelfTest
from kernels.tile_registers import usable

CPU = torch.device("cpu")
NAMES = ["linear", "rms_norm", "silu_mul", "gdn", "attention", "moe", "top1", "moves"]


def results(ops: Ops, dtype: torch.dtype = torch.float32) -> dict[str, OperatorResult]:
    with torch.inference_mode():
        return {r.operator: r for r in SelfTest(ops, CPU, dtype).operators()}


def rows(ops: Ops) -> dict[str, RowsResult]:
    with torch.inference_mode():
        return {r.what: r for r in SelfTest(ops, CPU, torch.float32).rows()}


def test_the_cpu_operators_are_right() -> None:
    found = results(cpu_ops())
    assert list(found) == [*NAMES, "draft_chain"]
    assert all(result.right for result in found.values()), found
    assert {r.form for r in found.values()} == {"cpu"}
    assert found["gdn"].error > 0, "another implementation than the truth was run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_truth_agrees_with_itself(dtype: torch.dtype) -> None:
    found = results(naive_ops(dtype), dtype)
    assert list(found) == NAMES
    assert {result.form for result in found.values()} == {"naive", "torch"}
    assert {result.error for result in found.values()} == {0.0}


@pytest.mark.parametrize("field", ["silu_mul", "gdn_mixer", "attention_mixer", "top1"])
@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_an_operator_that_is_wrong_is_found(field: str, wrong: float) -> None:
    right = getattr(cpu_ops(), field)

    def off(*args: object) -> object:
        out = right(*args)
        return (out[0], out[1] * wrong) if isinstance(out, tuple) else out * wrong

    found = results(replace(cpu_ops(), **{field: off}))
    bad = {name for name, result in found.items() if not result.right}
    expected = {"silu_mul": {"silu_mul", "moe"}, "top1": {"top1"}}
    assert bad == expected.get(field, {field.removesuffix("_mixer")})


def test_states_and_pages_that_are_wrong_are_found_too() -> None:
    ops = cpu_ops()

    def spoils(qkv: Tensor, params: object, pages: object, *rest: object) -> Tensor:
        out: Tensor = ops.attention_mixer(qkv, params, pages, *rest)  # type: ignore[arg-type]
        pages.k[0] += 1.0  # type: ignore[attr-defined]
        return out

    assert not results(replace(ops, attention_mixer=spoils))["attention"].right


def test_rows_of_the_cpu_operators_do_not_depend_on_their_company() -> None:
    found = rows(cpu_ops())
    tiles = ["linear bfloat16 (amx)"] if usable() else []
    others = ["linear bfloat16 (fp16)", "linear float32 (float32)", "gdn", "attention"]
    assert list(found) == tiles + others
    assert not any(result.different for result in found.values())


def test_rows_that_depend_on_their_company_are_found() -> None:
    ops = cpu_ops()

    def nudged(out: Tensor) -> Tensor:
        return out * (1 + 1e-6 * (out.shape[0] == 2))

    def pack(weight: Tensor) -> object:
        linear = ops.pack_linear(weight)
        return lambda x: nudged(linear(x))

    found = rows(
        replace(
            ops,
            pack_linear=pack,
            gdn_mixer=lambda *args: nudged(ops.gdn_mixer(*args)),
            attention_mixer=lambda *args: nudged(ops.attention_mixer(*args)),
        )
    )
    assert found["linear bfloat16 (?)"].different == ("2 rows",)
    assert found["gdn"].different == ("2 sequences", "3 rows of one sequence")
    assert found["attention"].different == ("2 sequences", "3 rows of one sequence")
