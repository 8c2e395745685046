"""A runner whose drafts are often right, because the answers are known. Changes no logits.

For the proof that speculation changes no token: accepted, rejected and partly accepted bursts all
occur, and every token is still the target's own.
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


class ReferenceRunner:
    """Wraps a runner; each proposed token is the answer's with a fixed chance, else the drafter's.

    Args:
        runner: does all the work.
        answers: tokens of every request, in the order in which they come to run.
        prompt: tokens of every prompt.
        chance: of each draft to be the answer's.
        seed: of the choices.
    """

    def __init__(
        self,
        runner: ModelRunner,
        answers: Sequence[tuple[int, ...]],
        prompt: int,
        chance: float,
        seed: int = 0,
    ) -> None:
        self._runner = runner
        self._answers = answers
        self._prompt = prompt
        self._chance = chance
        self._random = np.random.default_rng(seed)
        self._owner: dict[int, int] = {}
        self._claimed = 0
        self.vocab_size = runner.vocab_size
        self.device: torch.device = runner.device

    @property
    def state_bytes(self) -> int:
        """See ModelRunner."""
        return self._runner.state_bytes

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        """See ModelRunner."""
        return self._runner.forward(segments)

    def claim_slot(self, slot: int) -> None:
        """See ModelRunner; the next request has come to run."""
        self._owner[slot] = self._claimed
        self._claimed += 1
        self._runner.claim_slot(slot)

    def move_slot(self, src: int, dst: int) -> None:
        """See ModelRunner."""
        self._owner[dst] = self._owner[src]
        self._runner.move_slot(src, dst)

    def accept(self, verified: Sequence[Verified]) -> None:
        """See ModelRunner."""
        self._runner.accept(verified)

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """The drafter's proposals, with tokens of the answers among them."""
        proposals = self._runner.draft(rows, hidden)
        return [self._improved(r, p) for r, p in zip(rows, proposals, strict=True)]

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        """See ModelRunner."""
        self._runner.remember(rows, hidden)

    def _improved(self, entry: DraftRows, proposal: Proposal) -> Proposal:
        answer = self._answers[self._owner[entry.slot]]
        # The last known token sits at start + len(next_tokens); the answer begins at `prompt`.
        first = entry.start + len(entry.next_tokens) + 1 - self._prompt
        tokens = tuple(
            answer[first + i]
            if first + i < len(answer) and self._random.random() < self._chance
            else token
            for i, token in enumerate(proposal.tokens)
        )
        return Proposal(tokens, proposal.logprobs)
