"""Bytes and flops of a step against integers computed by hand, and the page that shows them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.paper import Paper, main, pages
from benchmarks.traffic import (
    StepShape,
    Work,
    draft_work,
    floor_seconds,
    forced_bytes,
    state_bytes,
    step_work,
    total_flops,
)
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.weights.model_config import ModelConfig, parse_config

ROOT = Path(__file__).resolve().parent.parent.parent
GEOMETRIES = files("configs") / "geometries"
CARRY, REPLAY, SNAPSHOT = (
    SsmRollbackMode.CARRY,
    SsmRollbackMode.REPLAY,
    SsmRollbackMode.SNAPSHOT,
)


def model(name: str) -> ModelConfig:
    parsed = parse_config(json.loads((GEOMETRIES / f"{name}.json").read_text(encoding="utf-8")))
    assert parsed.mtp_layers == 1
    return parsed


BIG = model("qwen3.6-27b")


def table(work: tuple[Work, ...]) -> dict[str, tuple[int, int]]:
    return {item.operator: (item.bytes, item.flops) for item in work}


def test_a_plain_step_of_the_27b() -> None:
    found = table(step_work(BIG, StepShape(1, context=1024)))
    # Outputs x inputs x layers x 2 bytes; as many flops, as one row makes 2 of a number.
    assert found["GDN in_proj"] == (16_480 * 5_120 * 48 * 2, 8_100_249_600)
    assert found["GDN out_proj"] == (3_019_898_880, 3_019_898_880)
    assert found["attention qkv_proj"] == (2_348_810_240, 2_348_810_240)
    assert found["attention o_proj"] == (1_006_632_960, 1_006_632_960)
    assert found["MLP gate_up"] == (22_817_013_760, 22_817_013_760)
    assert found["MLP down"] == (11_408_506_880, 11_408_506_880)
    assert found["head"] == (2_542_796_800, 2_542_796_800)
    # 48 layers x 48 heads x 128 x 128 numbers: in and out at 4 bytes, 7 operations.
    assert found["GDN state"] == (301_989_888, 264_241_152)
    # 48 x 10,240 channels of 4 taps: in and out at 4 bytes, 8 operations a channel.
    assert found["conv state"] == (15_728_640, 3_932_160)
    # 1,025 tokens of 16 layers x 4 heads x 256 x (k, v) x 2 bytes; 24 heads read 1,024 keys.
    assert found["attention KV"] == (67_174_400, 402_653_184)


def test_weights_are_read_once_whatever_the_batch() -> None:
    one, many = (table(step_work(BIG, StepShape(n))) for n in (1, 32))
    assert many["MLP down"] == (11_408_506_880, 32 * 11_408_506_880)
    for operator in ("GDN state", "conv state", "attention KV", "activations"):
        assert many[operator] == tuple(32 * n for n in one[operator])


def test_a_verify_multiplies_arithmetic_and_hardly_bytes() -> None:
    plain, verify = (step_work(BIG, StepShape(1, rows, emitted=rows)) for rows in (1, 4))
    before, after = table(plain), table(verify)
    for operator, (moved, flops) in before.items():
        assert after[operator][1] == 4 * flops
        if operator.endswith("proj") or operator.startswith(("MLP", "head")):
            assert after[operator][0] == moved
    # Three ring rows in and three out, three more tokens in the KV, three more embedding rows.
    extra = 6 * 48 * 41_344 + 3 * 65_536 + 3 * 5_120 * 2
    assert forced_bytes(verify) - forced_bytes(plain) == extra


@pytest.mark.parametrize(
    ("mode", "emitted", "moved"),
    [
        # 2 x 158,859,264 and 48 x 41,344 for each ring row: three in, emitted - 1 out.
        (CARRY, 1, 323_672_064),
        (CARRY, 4, 329_625_600),
        # State saved, then a plain step, three rows of 48 x 65,920; then back and run again.
        (REPLAY, 1, 1_283_530_752),
        (REPLAY, 3, 1_289_859_072),
        (REPLAY, 4, 644_929_536),
        # State saved, a plain step, three h of 150,994,944, four conv of 7,864,320; one back.
        (SNAPSHOT, 1, 1_437_597_696),
        (SNAPSHOT, 4, 1_119_879_168),
    ],
)
def test_state_of_each_mode(mode: SsmRollbackMode, emitted: int, moved: int) -> None:
    assert state_bytes(BIG, StepShape(1, 4, mode=mode, emitted=emitted)) == moved
    assert state_bytes(BIG, StepShape(1, 1, mode=mode)) == 317_718_528


def test_three_drafts_read_head_and_layer_three_times() -> None:
    found = table(draft_work(BIG, StepShape(2, 4, context=100, emitted=3)))
    layer = (2 * 5_120 + 14_336 + 6_144 + 3 * 17_408) * 5_120
    # Each of two sequences runs three final rows and two re-fed ones.
    assert found["drafter layer"] == (3 * layer * 2, 2 * 10 * layer)
    assert found["drafter head"] == (3 * 2_542_796_800, 6 * 2 * 248_320 * 5_120)
    assert found["drafter KV"][0] == 3 * 2 * 101 * 4_096
    assert draft_work(BIG, StepShape(2)) == ()


def test_experts_that_nobody_takes_are_not_read() -> None:
    moe = model("qwen3.6-35b-a3b")
    one = table(step_work(moe, StepShape(1)))["MoE experts"]
    # 8 of 256 experts of 3 x 512 x 2,048 in 40 layers.
    assert one == (40 * 8 * 3 * 512 * 2_048 * 2, 2 * 40 * 8 * 3 * 512 * 2_048)
    every = table(step_work(moe, StepShape(4096)))["MoE experts"]
    assert every[0] == 40 * 256 * 3 * 512 * 2_048 * 2


def test_a_floor_takes_the_longer_time_of_each_operator() -> None:
    work = (Work("a", 100, 10), Work("b", 10, 1000), Work("c", 500, 0, forced=False))
    assert floor_seconds(work, bandwidth=10.0) == pytest.approx(11.0)
    assert floor_seconds(work, bandwidth=10.0, rate=10.0) == pytest.approx(10.0 + 100.0)
    assert (forced_bytes(work), total_flops(work)) == (110, 1010)


def test_the_documents_show_what_the_code_computes() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in pages(Paper(BIG, 4, 1024)) if line not in text]
    assert not missing, "run python -m benchmarks.paper and paste its tables"


def test_the_command_ends_with_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text((GEOMETRIES / "qwen3.6-27b.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert main([str(path), "--drafts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["model"] == "mine"
    assert any(line.startswith("| verify and 1 drafts | 128") for line in lines)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([str(path)])
