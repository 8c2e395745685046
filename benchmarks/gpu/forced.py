"""A runner that decides how many drafts come true, so that a verify costs what it costs in service.

Random weights would agree with a random drafter on nothing. All work of the wrapped runner is done;
only the logits of verified rows are overwritten, two launches a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.runner import (
    DraftRows,
    ForwardResult,
    ModelRunner,
    PlainRows,
    Proposal,
    Segment,
    Verified,
)

# Above and below every logit of a network.
_CERTAIN = 1e30


class ForcedRunner:
    """Wraps a runner; each draft comes true with a fixed chance as long as those before it did.

    Args:
        runner: does all the work.
        chance: that a draft is accepted, 0 to 1.
        seed: of the verdicts.
    """

    def __init__(self, runner: ModelRunner, chance: float, seed: int = 0) -> None:
        self._runner = runner
        self._chance = chance
        self._random = np.random.default_rng(seed)
        self.vocab_size = runner.vocab_size
        self.device = runner.device

    @property
    def state_bytes(self) -> int:
        """See ModelRunner."""
        return self._runner.state_bytes

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        """The runner's own forward, then the verdicts."""
        rows, tokens, values = self._verdicts(segments)
        if not rows:
            return self._runner.forward(segments)
        # On the device before the forward: a copy behind it would wait for it.
        places = torch.tensor([rows, tokens], device=self.device)
        forced = torch.tensor(values, device=self.device)
        result = self._runner.forward(segments)
        return ForwardResult(_overwritten(result.logits, places, forced), result.hidden)

    def claim_slot(self, slot: int) -> None:
        """See ModelRunner."""
        self._runner.claim_slot(slot)

    def move_slot(self, src: int, dst: int) -> None:
        """See ModelRunner."""
        self._runner.move_slot(src, dst)

    def accept(self, verified: Sequence[Verified]) -> None:
        """See ModelRunner."""
        self._runner.accept(verified)

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """See ModelRunner."""
        return self._runner.draft(rows, hidden)

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        """See ModelRunner."""
        self._runner.remember(rows, hidden)

    def _verdicts(self, segments: Sequence[Segment]) -> tuple[list[int], list[int], list[float]]:
        """(logits row, token, value) of every draft up to and with the first rejected one."""
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        row = 0
        for segment in segments:
            drafts = segment.token_ids[segment.committed :]
            first = row + segment.logit_rows - len(drafts) - 1
            for number, token in enumerate(drafts):
                accepted = self._random.random() < self._chance
                rows.append(first + number)
                tokens.append(token)
                values.append(_CERTAIN if accepted else -_CERTAIN)
                if not accepted:
                    break
            row += segment.logit_rows
        return rows, tokens, values


@torch.inference_mode()
def _overwritten(logits: Tensor, places: Tensor, values: Tensor) -> Tensor:
    return logits.index_put_((places[0], places[1]), values.to(logits.dtype))
