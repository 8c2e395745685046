"""The drafter against transformers' MtpModel: whole prompts and three re-fed drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.batching import step_input
from engine.model.hybrid import HybridModel
from engine.pools.rollback import RowLayout
from engine.runner import DraftRows, PlainRows, RowPhase, Segment
from tests.oracle.checkpoints import Oracle
from tests.oracle.ours import segment
from tests.oracle.test_logits import prompt

TOLERANCE = 1e-4


def mtp_model(oracle: Oracle) -> tuple[Any, Any]:
    """(model, MtpModel) of the folder; MtpModel reads the path that from_pretrained leaves."""
    from transformers.modeling_layers import MtpModel

    cls = type(oracle.model)
    config = cls.config_class.from_pretrained(oracle.folder)
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    config._attn_implementation = "eager"
    model = cls.from_pretrained(oracle.folder, config=config).eval()
    return model, MtpModel.from_pretrained(model).eval()


def test_drafts(oracle: Oracle, model: HybridModel) -> None:
    from transformers.cache_utils import MtpCache

    ids = prompt(20, 3)
    target, mtp = mtp_model(oracle)
    want = []
    with torch.no_grad():
        out = target(input_ids=torch.tensor([ids]), use_cache=False)
        nxt = int(out.logits[0, -1].argmax())
        shifted = [*ids[1:], nxt]
        cache = MtpCache(config=target.config.get_mtp_config())
        positions = torch.arange(1, 21)[None]
        hidden = mtp.forward_layer(
            0,
            target.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state,
            positions,
            cache,
            input_ids=torch.tensor([shifted]),
        )[:, -1:]
        for step in range(3):
            want.append(target.lm_head(hidden[:, -1])[0])
            if step < 2:
                token = want[-1].argmax().view(1, 1)
                place = positions[:, -1:] + step + 1
                hidden = mtp.forward_layer(0, hidden, place, cache, input_ids=token)

    ours = model.forward([segment(1, 0, ids, RowPhase.PREFILL)])
    out, logits = head(model, segment(1, 0, shifted, RowPhase.DECODE, logit_rows=1), ours.hidden)
    got = [logits]
    for step in range(1, 3):
        row = segment(1, 19 + step, [int(got[-1].argmax())], RowPhase.DECODE)
        out, logits = head(model, row, out[-1:])
        got.append(logits)
    assert float((torch.cat(got) - torch.stack(want)).abs().max()) <= TOLERANCE

    table = segment(1, 0, [0], RowPhase.DECODE).block_table
    model.claim_slot(1)
    rows = DraftRows(1, 0, 0, tuple(shifted), table, engaged=True, drafts=3)
    (proposal,) = model.draft([rows], ours.hidden)
    assert list(proposal.tokens) == [int(logits.argmax()) for logits in want]
    best = [float(logits.log_softmax(-1).max()) for logits in want]
    torch.testing.assert_close(proposal.logprobs, tuple(best), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def head(model: HybridModel, rows: Segment, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The MTP head alone: hidden states and logits of the wanted rows."""
    layouts = [RowLayout(len(rows.token_ids))]
    pending = model.states.pending * 0
    step = step_input([rows], layouts, pending, model.kv.dummy_block, model.device)
    network = model.network
    assert network.mtp is not None
    embedded = network.embed[step.token_ids].float()
    out = network.mtp(embedded, hidden, step.batch, step.logit_rows)
    return out, network.lm_head(out)


def test_a_pause_costs_context_and_nothing_else(oracle: Oracle, model: HybridModel) -> None:
    """Remembered rows give the drafts of rows written at once; a long pause gives some drafts."""
    ids = prompt(100, 5)
    table = segment(0, 0, [0], RowPhase.DECODE).block_table

    def rows(slot: int, start: int, end: int, first: int, *, engaged: bool) -> DraftRows:
        tokens = tuple(ids[start + 1 : end + 1])
        blocks = tuple(block + slot * len(table) for block in table)
        return DraftRows(slot, start, first, tokens, blocks, engaged, 3 if engaged else 0)

    for slot in (0, 1, 2):
        model.claim_slot(slot)
    hidden = model.forward([segment(0, 0, ids[:99], RowPhase.PREFILL)]).hidden
    model.draft([rows(0, 0, 30, 0, engaged=True)], hidden)
    want = model.draft([rows(0, 30, 90, 30, engaged=True)], hidden)
    model.draft([rows(1, 0, 30, 0, engaged=True)], hidden)
    for start in range(30, 70, 10):
        model.draft([rows(1, start, start + 10, start, engaged=False)], hidden)
    slots = np.array([1])
    for position in range(70, 80):
        # A row of many, then steps of rows that are all meant and may wait for each other.
        one = position < 72
        at, behind = np.array([position]), [ids[position + 1]]
        plain = PlainRows(slots, at, at if one else None, behind)
        model.remember(plain, hidden if one else hidden[position : position + 1])
    assert model.draft([rows(1, 80, 90, 80, engaged=True)], hidden) == want
    model.draft([rows(2, 0, 80, 0, engaged=False)], hidden)
    model.move_slot(2, 1)
    (late,) = model.draft([rows(1, 80, 90, 80, engaged=True)], hidden)
    assert len(late.tokens) == 3
    assert all(logprob <= 0 for logprob in late.logprobs)
