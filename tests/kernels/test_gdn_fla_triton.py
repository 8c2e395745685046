"""The GDN recurrence against flash-linear-attention, a second oracle where it is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cases import relative_error
from kernels.gdn.triton_chunk import chunked_prefill
from kernels.gdn.triton_inputs import gdn_inputs
from kernels.gdn.triton_step import recurrent_step
from tests.kernels.poison import DEVICE
from tests.kernels.scenes import Rows, gdn_params, gdn_proj, gdn_state, make_batch, moved


def fla(form: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Its function for a form; skips where it is not installed.

    What it warns of at import is not ours to mend. Its chunked kernel looks for a card when it is
    tuned; without one its own reference stands in.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("fla.ops.gated_delta_rule")
    if form == "recurrent":
        return module.fused_recurrent_gated_delta_rule
    if DEVICE.type == "cuda":
        return module.chunk_gated_delta_rule
    return module.naive.naive_chunk_gated_delta_rule


@pytest.mark.parametrize(("form", "rows"), [("recurrent", 5), ("chunk", 65)])
def test_against_fla(form: str, rows: int) -> None:
    run = fla(form)
    params = moved(gdn_params(2, 2, 32, 32), DEVICE)
    state = moved(gdn_state(params, 1), DEVICE)
    before = state.h.clone()
    batch = moved(make_batch([Rows(0, 64, rows, chunked=form == "chunk")]), DEVICE)
    inputs = gdn_inputs(gdn_proj(params, rows).to(DEVICE), params, state, batch)
    q, k, v, g, beta = (
        x[None, :rows].clone()
        for x in (inputs.q, inputs.k, inputs.v, inputs.gates[:, 0], inputs.gates[:, 1])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, after = run(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=before, output_final_state=True
        )
    if form == "chunk":
        chunked_prefill(inputs, state, batch, operand=torch.float32)
    else:
        recurrent_step(inputs, state, batch)
    # Its chunked kernel multiplies in TF32.
    tolerance = 5e-3 if run.__name__.startswith("chunk") else 1e-5
    assert relative_error([inputs.v[:rows]], [want[0]]) < tolerance
    assert relative_error([state.h], [after]) < tolerance
