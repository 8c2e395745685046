"""The stored states against transformers' cache, and the bits of one sequence in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model.hybrid import HybridModel
from engine.runner import RowPhase
from kernels.linear import cpu
from kernels.tile_registers import usable
from tests.oracle.checkpoints import Oracle, make
from tests.oracle.ours import SLOTS, build, run, segment, split_prompt
from tests.oracle.test_logits import prompt


def poison(model: HybridModel) -> None:
    for tensor in (model.states.h, model.states.conv, model.kv.k, model.kv.v):
        tensor.fill_(torch.nan)
    model.states.ring_inputs.fill_(torch.nan)
    model.states.ring_gates.fill_(torch.nan)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 31, 63, 64, 65, 127, 128, 129, 192, 193])
def test_states_after_a_prompt(
    oracles: Callable[[str, int], Oracle], kernels: str, length: int
) -> None:
    oracle = oracles("qwen3_5", 2)
    model = build(oracle.folder, kernels)
    poison(model)
    ids = prompt(length)
    got = model.forward([segment(4, 0, ids, RowPhase.PREFILL)])
    assert float((got.logits - oracle.logits(ids)).abs().max()) <= 3e-4
    assert float((got.hidden - oracle.hidden(ids)).abs().max()) <= 3e-4
    want = oracle.states(ids)
    assert model.states.h.shape == (3, SLOTS + 1, 4, 16, 16)
    assert model.states.conv.shape == (3, SLOTS + 1, 2 * 2 * 16 + 4 * 16, 4)
    assert model.states.h.dtype == model.states.conv.dtype == torch.float32
    for layer, (h, conv) in enumerate(want):
        torch.testing.assert_close(model.states.h[layer, 4], h, atol=1e-5, rtol=1e-3)
        # The oldest column is never read again, and transformers leaves it zero for short prompts.
        torch.testing.assert_close(
            model.states.conv[layer, 4][:, 1:], conv[:, 1:], atol=3e-4, rtol=1e-4
        )


@pytest.fixture(scope="module", params=["float32", "fp16", "amx"])
def exact_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> HybridModel:
    """The same model with each form of packed products."""
    if request.param == "amx" and not usable():
        pytest.skip("this machine multiplies no tiles")
    folder: Path = tmp_path_factory.mktemp("exact")
    oracle = make(folder, "qwen3_5_moe", 2, bf16=request.param != "float32")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fp16":
            patch.setattr(cpu, "usable", lambda: False)
        model = build(oracle.folder, "cpu", threads=2)
    assert model.network.lm_head.form == request.param  # type: ignore[attr-defined]
    return model


def test_the_bits_of_a_sequence_do_not_depend_on_splits_or_neighbours(
    exact_model: HybridModel,
) -> None:
    model, ids = exact_model, prompt(77)
    want = run(model, [segment(0, 0, ids, RowPhase.PREFILL)])
    state = model.states.h[:, 0].clone()
    for sizes in ([1] * 77, [64, 13], [7] * 11, [30, 1, 46]):
        assert torch.equal(run(model, split_prompt(1, ids, sizes)), want)
        assert torch.equal(model.states.h[:, 1], state)
    others = [segment(slot, 0, prompt(9 + slot, slot), RowPhase.PREFILL) for slot in (1, 2, 3)]
    among = model.forward([*others[:2], segment(5, 0, ids, RowPhase.PREFILL), others[2]]).logits
    assert torch.equal(among[10 + 11 : 10 + 11 + 77], want)


def test_verify_rows_have_the_bits_of_plain_steps(exact_model: HybridModel) -> None:
    model, ids = exact_model, prompt(40)
    plain = [segment(0, 0, ids[:20], RowPhase.PREFILL)]
    plain += [segment(0, i, [ids[i]], RowPhase.DECODE) for i in range(20, 40)]
    want = run(model, plain)[20:]
    got = []
    model.forward([segment(1, 0, ids[:20], RowPhase.PREFILL)])
    position = 20
    for accepted in (3, 0, 1, 2, 3, 0):
        right = ids[position : position + 1 + accepted]
        rows = [*right, 5, 6, 7][:4]
        out = model.forward([segment(1, position, rows, RowPhase.DECODE, committed=1)]).logits
        got.append(out[: len(right)])
        model.states.pending[1] = accepted
        position += len(right)
    got = torch.cat(got)
    assert torch.equal(got, want[: len(got)])
