"""The drafter against transformers' MtpModel: whole prompts and three re-fed drafts."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.hybrid import HybridModel
from engine.runner import RowPhase
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
    drafted = model.draft([segment(1, 0, shifted, RowPhase.DECODE, logit_rows=1)], ours.hidden)
    got = [drafted.logits[-1]]
    for step in range(1, 3):
        token = int(got[-1].argmax())
        row = segment(1, 19 + step, [token], RowPhase.DECODE)
        drafted = model.draft([row], drafted.hidden[-1:])
        got.append(drafted.logits[-1])
    assert float((torch.stack(got) - torch.stack(want)).abs().max()) <= TOLERANCE
