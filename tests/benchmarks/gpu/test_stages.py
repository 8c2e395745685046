"""What each stage counts as bad, and that the settings of the ladder fit the card they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import stage_card, stage_kernels, stage_mixers
from benchmarks.gpu.engines import engine_config, model_of, speculation
from benchmarks.gpu.geometries import LARGE, SMALL
from benchmarks.gpu.options import Machine, Options
from benchmarks.gpu.rows import Row, Status
from benchmarks.gpu.stage_engine import DRAFTS, LENGTH, SNAPSHOT_WIDTH, WIDTHS
from engine.build import reserve_policy
from engine.reserve.parameters import resident_bytes, tensors_of_config
from engine.reserve.preflight import preflight_reserve
from engine.reserve.ssm_reserve import SsmRollbackMode
from kernels.cases import Case

OPTIONS = Options(device="cpu", smoke=True, kernels="naive")


def case(name: str, out: float, truth: float = 1.0, fault: Exception | None = None) -> Case:
    def run() -> list[torch.Tensor]:
        if fault is not None:
            raise fault
        return [torch.tensor([out])]

    return Case(
        name=name,
        dtype=torch.float32,
        run=run,
        truth=lambda: [torch.tensor([truth])],
        step=lambda: None,
        tolerance=1e-3,
        bytes=100,
        flops=10,
    )


def rows_of(monkeypatch: pytest.MonkeyPatch, cases: list[Case]) -> list[Row]:
    monkeypatch.setattr(stage_kernels, "load_cases", lambda operator, size, device: cases)
    found: list[Row] = []
    stage_kernels.check("silu_mul", OPTIONS, found.append)
    return found


def test_every_folder_is_an_operator() -> None:
    assert {"gdn", "attention", "silu_mul", "top1"} <= set(stage_kernels.operators())


def test_a_folder_without_cases_fails() -> None:
    found: list[Row] = []
    stage_kernels.check("nothing_here", OPTIONS, found.append)
    assert [(row.status, row.text) for row in found] == [
        (Status.FAIL, "kernels/nothing_here has no cases.py")
    ]


def test_an_empty_list_of_cases_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of(monkeypatch, [])
    assert row.status is Status.FAIL


def test_each_case_is_judged_and_the_worst_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case("right", 1.0), case("wrong", 1.1), case("broken", 1.0, fault=OSError("lost"))]
    found = rows_of(monkeypatch, cases)
    assert [row.status for row in found] == [
        Status.OK,
        Status.FAIL,
        Status.ERROR,
        Status.FAIL,
    ]
    assert found[2].text == "OSError: lost"
    assert found[-1].text.startswith("2 of 3 cases, worst error 1.0e-01 of 1e-03")
    assert found[-1].numbers["worst"] == "wrong float32"


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(monkeypatch, [case("nan", float("nan"))])
    assert found[0].status is Status.FAIL


def test_the_roofline_is_the_longer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("x", 1.0)
    assert stage_kernels.roofline_seconds(one, Machine(bandwidth=10.0, rate=1e9)) == 10.0
    assert stage_kernels.roofline_seconds(one, Machine(bandwidth=1e9, rate=2.0)) == 5.0
    monkeypatch.setattr(stage_kernels, "load_cases", lambda *args: [one, one])
    found: list[Row] = []
    stage_kernels.measure("silu_mul", replace(OPTIONS, machine=Machine(1e9, 1e9)), found.append)
    assert [row.name for row in found] == ["x float32 speed", "silu_mul speed"]
    assert isinstance(found[0].numbers["roofline_share"], float)
    stage_kernels.measure("silu_mul", OPTIONS, found.append)
    assert found[-1].status is Status.SKIP


def test_limits_are_learnt_when_both_are_measured() -> None:
    copy = Row("card", stage_card.COPY, Status.INFO, "", {"per_second": 5.0})
    product = Row("card", stage_card.PRODUCT, Status.INFO, "", {"per_second": 7.0})
    assert stage_card.learn(OPTIONS, [copy, product]).machine == Machine(5.0, 7.0)
    assert stage_card.learn(OPTIONS, [copy]).machine is None


def test_goals_of_the_mixers_are_judged_on_a_card_only() -> None:
    card = replace(OPTIONS, smoke=False, device="cuda", machine=Machine(100.0, 1.0))
    fast = stage_mixers._speed("GDN step", 16, 80, 1.0, card)
    slow = stage_mixers._speed("GDN step", 16, 70, 1.0, card)
    narrow = stage_mixers._speed("GDN step", 1, 10, 1.0, card)
    assert [row.status for row in (fast, slow, narrow)] == [Status.OK, Status.FAIL, Status.INFO]
    smoke = stage_mixers._speed("GDN step", 16, 70, 1.0, replace(card, smoke=True))
    assert smoke.status is Status.INFO


def test_bytes_of_one_layer_of_the_27b() -> None:
    bench = stage_mixers.Bench(
        model_of(LARGE),
        None,  # type: ignore[arg-type]
        torch.device("cpu"),
        torch.bfloat16,
    )
    # h of 48 x 128 x 128 and conv of 10,240 x 4, in and out; qkv, z, gates in and value_dim out.
    plain = 2 * (786_432 + 40_960) * 4 + (10_240 + 6_144 + 96 + 6_144) * 2
    assert stage_mixers.gdn_bytes(bench, 16, 1, 0) == 16 * plain
    # 4,095 cached tokens of 4 heads x 256, k and v; 2 x 24 + 2 x 4 heads in, k, v and 24 out.
    step = (2 * 4_095 * 4 + 48 + 8 + 8 + 24) * 256 * 2
    assert stage_mixers.attention_bytes(bench, 16, 1, 4096) == 16 * step


@pytest.mark.parametrize("name", [SMALL, LARGE])
@pytest.mark.parametrize("mode", [None, *SsmRollbackMode])
def test_every_ladder_fits_an_h200(name: str, mode: SsmRollbackMode | None) -> None:
    model = model_of(name)
    width = SNAPSHOT_WIDTH if mode is SsmRollbackMode.SNAPSHOT else max(WIDTHS)
    config = replace(
        engine_config(OPTIONS, width, LENGTH, "bfloat16"),
        device="cuda",
        kernels="triton",
        memory_budget=int(0.9 * 139 * 2**30),
        speculation=None if mode is None else speculation(mode, width, DRAFTS),
    )
    weights = resident_bytes(tensors_of_config(model), model, config, with_mtp=mode is not None)
    found = preflight_reserve(
        model,
        config,
        budget=config.memory_budget or 0,
        weights_bytes=weights,
        policy=reserve_policy(config),
    )
    assert found.kv_tokens == width * LENGTH
