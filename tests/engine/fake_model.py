"""A model of plain arithmetic whose tokens depend on every token of the history, in order.

One half of the history lives in the slot, the other in the KV blocks, so a wrong slot, a stale
state, a lost move, a wrong block table or a block of another prompt changes the tokens. As in the
real model, prompt rows (chunked form, exact only on the 64 grid) and generated rows (recurrent
form) leave different traces, unless the model has one form for both; and a draft's row never
touches the slot before the draft is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.config import GRID
from engine.request import GenerationRequest, SamplingParams
from engine.runner import ForwardResult, Restore, RowPhase, SavedState, Segment

_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return (state * 6364136223846793005 + value * 1442695040888963407 + 12345) & _MASK


class FakeModel:
    """A ModelRunner with `slots` states and `blocks` KV blocks of GRID tokens.

    With `one_form` prompt rows and generated rows leave the same traces.
    """

    device = torch.device("cpu")

    def __init__(
        self, slots: int, blocks: int, vocab_size: int = 97, *, one_form: bool = False
    ) -> None:
        self._prompt_form = 0 if one_form else 5000
        self.vocab_size = vocab_size
        self.states: list[tuple[int, int]] = [(-999, 7)] * slots  # (tokens consumed, digest)
        self.pending: list[list[int]] = [[] for _ in range(slots)]
        # Per position: (token, digest of the KV before and here), so a lookup of one entry covers
        # all before it; every block's first position also checks the block before it.
        self.kv = [[(-1, 13)] * GRID for _ in range(blocks)]
        self._ids = np.arange(1, vocab_size + 1, dtype=np.uint64)
        self.steps: list[list[Segment]] = []
        self.fail_next: Exception | None = None
        self.saved: dict[int, tuple[int, int]] = {}  # by place, as `states`

    def claim_slot(self, slot: int) -> None:
        self.states[slot] = (0, 1)
        self.pending[slot] = []

    def move_slot(self, src: int, dst: int) -> None:
        self.states[dst] = self.states[src]
        self.pending[dst] = self.pending[src]
        self.states[src] = (-999, 31)  # poison

    def save_state(self, saved: SavedState, hidden: torch.Tensor) -> None:
        consumed, digest = self.states[saved.slot]
        verify = self.steps[-1] and saved.rows > 1 and self.pending[saved.slot]
        for token in self.pending[saved.slot][: saved.wanted - 1] if verify else ():
            consumed, digest = consumed + 1, _mix(digest, token + 1)
        assert hidden[saved.hidden_row] == consumed - 1, "the hidden state of another position"
        self.saved[saved.place] = (consumed, digest)

    def note_hidden(self, place: int, hidden: torch.Tensor) -> None:
        assert hidden == self.saved[place][0] - 1, "the hidden state of another position"

    def restore(self, restored: Restore) -> None:
        assert self.states[restored.slot] == (0, 1), "the slot was not claimed"
        assert self.saved[restored.place][0] == restored.position, "the state of another position"
        self.states[restored.slot] = self.saved[restored.place]

    def drafted_rows(self, slot: int) -> tuple[int, int]:
        return 0, 0

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert len({s.slot for s in segments}) == len(segments), "a slot appears twice"
        self.steps.append(list(segments))
        rows = [row for segment in segments for row in self._run(segment)]
        logits = torch.from_numpy(np.array(rows, np.float32).reshape(len(rows), self.vocab_size))
        positions = [s.start + i for s in segments for i in range(len(s.token_ids))]
        return ForwardResult(logits, torch.tensor(positions).view(-1, 1))

    def _run(self, segment: Segment) -> list[npt.NDArray[np.float32]]:
        slot, start = segment.slot, segment.start
        end = start + len(segment.token_ids)
        assert len(segment.block_table) * GRID >= end, "the block table is too short"
        consumed, digest = self.states[slot]
        # Drafts accepted by the step before are folded in now, as in the carry mode.
        accepted = start - consumed
        assert 0 <= accepted <= len(self.pending[slot]), (consumed, start, self.pending[slot])
        for token in self.pending[slot][:accepted]:
            digest = _mix(digest, token + 1)
        logits: list[npt.NDArray[np.float32]] = []
        first_logit = len(segment.token_ids) - segment.logit_rows
        if segment.phase is RowPhase.PREFILL:
            assert segment.committed == len(segment.token_ids)
            if start % GRID:
                digest = _mix(digest, 10**6)  # off the grid: other last bits
        for row, token in enumerate(segment.token_ids):
            position = start + row
            form = self._prompt_form if segment.phase is RowPhase.PREFILL else 0
            digest = _mix(digest, token + 1 + form)
            kv = self._write_kv(segment.block_table, position, token + form)
            if row < segment.committed:
                self.states[slot] = (position + 1, digest)
            for save in segment.saves:
                if save.rows == row + 1:
                    self.saved[save.place] = self.states[slot]
            if row >= first_logit:
                logits.append(self._logits(digest, kv))
        self.pending[slot] = list(segment.token_ids[segment.committed :])
        return logits

    def _write_kv(self, table: tuple[int, ...], position: int, token: int) -> int:
        before = 1
        if position:
            before = self.kv[table[(position - 1) // GRID]][(position - 1) % GRID][1]
        digest = _mix(before, token + 77)
        self.kv[table[position // GRID]][position % GRID] = (token, digest)
        # A reader sees all its blocks, not only the last: fold the first entry of each.
        for block in range(position // GRID):
            digest = _mix(digest, self.kv[table[block]][0][0] + 3)
        return digest

    def _logits(self, digest: int, kv: int) -> npt.NDArray[np.float32]:
        bits = self._ids * np.uint64(_mix(digest, kv) | 1)  # wraps at 2^64
        bits ^= bits >> np.uint64(29)
        bits *= np.uint64(0xBF58476D1CE4E5B9)
        return ((bits >> np.uint64(40)) % np.uint64(4096)).astype(np.float32) / np.float32(512)


def request(
    request_id: int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    deadline: float | None = None,
    temperature: float = 0.0,
    **sampling: object,
) -> GenerationRequest:
    """A request with short notation."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
    return GenerationRequest(request_id, tuple(prompt), params, priority, deadline)
