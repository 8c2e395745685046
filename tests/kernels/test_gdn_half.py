"""The GDN mixer over a float16 state: near the truth, and rounded where a prompt is split.

That it is exact where the float32 form is, is tested beside that form.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gdn import cpu, naive
from tests.kernels.scenes import Mixer, Rows, gdn_params, gdn_proj, half_state, make_batch


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Where the last float32 bits differ, a rounding may go the other way: one float16 step."""
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a.float(), b.float(), atol=1e-3, rtol=3e-3)


@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 0, 1)],
        [Rows(2, 0, 3), Rows(0, 5, 1), Rows(1, 9, 4, committed=1, pending=2)],
        [Rows(1, 64, 65, chunked=True), Rows(0, 0, 130, chunked=True), Rows(3, 7, 1, pending=3)],
        [Rows(1, 6, 4, ring=(0, 3)), Rows(2, 8, 3, snapshot=2), Rows(0, 9, 0, pending=2)],
    ],
)
def test_cpu_equals_naive(rows: list[Rows]) -> None:
    params = gdn_params(2, 4, 64, 64)
    truth, state = half_state(params, 5), half_state(params, 5)
    batch = make_batch(rows)
    proj = gdn_proj(params, int(batch.row_start[-1]))
    want = naive.gdn_mixer(proj, params, truth, batch)
    got = cpu.gdn_mixer(proj, params, state, batch)
    close(got, want)
    close(state.h, truth.h)
    close(state.snapshot_h, truth.snapshot_h)
    assert state.h.dtype == state.snapshot_h.dtype == torch.float16
    assert torch.equal(state.ring_inputs, truth.ring_inputs)
    untouched = sorted(set(range(5)) - {r.slot for r in rows})
    assert torch.equal(state.h[untouched], half_state(params, 5).h[untouched])


@pytest.mark.parametrize("mixer", [naive.gdn_mixer, cpu.gdn_mixer])
@pytest.mark.parametrize("splits", [[200], [64, 136], [128, 72], [64, 64, 64, 8]])
def test_a_prompt_gives_the_same_bits_however_it_is_split_on_the_grid(
    mixer: Mixer, splits: list[int]
) -> None:
    params = gdn_params(2, 4, 32, 32)
    whole, parts = half_state(params, 2), half_state(params, 2)
    proj = gdn_proj(params, 200)
    want = mixer(proj, params, whole, make_batch([Rows(1, 0, 200, chunked=True)]))
    start, got = 0, []
    for count in splits:
        batch = make_batch([Rows(1, start, count, chunked=True)])
        got.append(mixer(proj[start : start + count], params, parts, batch))
        start += count
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(parts.h[1], whole.h[1])


def test_prompt_rows_are_rounded_less_often_than_others() -> None:
    params = gdn_params(2, 4, 32, 32)
    prompt, rows = half_state(params, 2), half_state(params, 2)
    proj = gdn_proj(params, 60)
    cpu.gdn_mixer(proj, params, prompt, make_batch([Rows(1, 0, 60, chunked=True)]))
    cpu.gdn_mixer(proj, params, rows, make_batch([Rows(1, 0, 60)]))
    assert not torch.equal(prompt.h[1], rows.h[1])
    close(prompt.h[1], rows.h[1])


@pytest.mark.parametrize("mixer", [naive.gdn_mixer, cpu.gdn_mixer])
def test_a_state_too_large_for_float16_stays_finite(mixer: Mixer) -> None:
    params = gdn_params(1, 2, 16, 16)
    state = half_state(params, 1)
    proj = gdn_proj(params, 3) * 1e6
    mixer(proj, params, state, make_batch([Rows(0, 4, 3)]))
    assert torch.isfinite(state.h).all()
    assert state.h.abs().max() == 65504
