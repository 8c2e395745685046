"""A model of arithmetic that falls into a loop, with copies of its slots' states.

Which loop does not depend on the history; everything else does, as in `fake_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import GenerationRequest, TokenDelta, TokenLogprobs
from engine.watchdogs.watchdogs import Watchdogs
from tests.engine.fake_model import FakeModel, request

VOCAB = 97
# 20 is followed by 21 and so on, and the last one by the first; 24 and 27 end sentences.
CYCLE = tuple(range(20, 28))
BOUNDARIES = bytes(token in (24, 27, 60, 70) for token in range(VOCAB))


class LoopyModel(FakeModel):
    """After a token of the cycle the next one is all but certain."""

    def __init__(self, slots: int, blocks: int, *, one_form: bool = False) -> None:
        super().__init__(slots, blocks, VOCAB, one_form=one_form)
        self._token = -1

    def _write_kv(self, table: tuple[int, ...], position: int, token: int) -> int:
        self._token = token
        return super()._write_kv(table, position, token)

    def _logits(self, digest: int, kv: int) -> npt.NDArray[np.float32]:
        logits = super()._logits(digest, kv)
        if self._token in CYCLE:
            logits[CYCLE[(CYCLE.index(self._token) + 1) % len(CYCLE)]] += 20
        return logits


class FakeRing:
    """A `Ring` over the states of a fake model."""

    def __init__(self, model: FakeModel, places: int) -> None:
        self._model = model
        self._kept: list[tuple[int, int] | None] = [None] * places
        self.saves = 0

    @property
    def places(self) -> int:
        return len(self._kept)

    def save(self, slot: int, place: int) -> None:
        assert not self._model.pending[slot]
        self._kept[place] = self._model.states[slot]
        self.saves += 1

    def load(self, place: int, slot: int) -> None:
        kept = self._kept[place]
        assert kept is not None
        self._model.states[slot] = kept
        self._model.pending[slot] = []


class Watched:
    """A core with watchdogs on a loopy model; keeps what a reader of all deltas would have.

    With `cached` a prefix cache reuses prompts and what was decoded.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        blocks: int = 64,
        depth: int = 8,
        watch: bool = True,
        cached: bool = False,
        **extra: Any,
    ) -> None:
        self.model = LoopyModel(slots, blocks, one_form=cached)
        self.ring = FakeRing(self.model, slots * depth)
        self.watchdogs = Watchdogs(self.ring, slots, lambda slots: None, BOUNDARIES)
        masks = extra.pop("masks", None)
        config = {"max_prefill_tokens": 128, "max_seq_len": 1000, **extra}
        if cached:
            config |= {"prefix_caching": True, "snapshot_slots": 6}
        self.core = EngineCore(
            EngineConfig("none", max_batch_size=slots, **config),
            self.model,
            kv_blocks=blocks,
            masks=masks,
            watchdogs=self.watchdogs if watch else None,
            keeper=self.model if cached else None,
            reuse_decoded=cached,
        )
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.last: dict[int, TokenDelta] = {}

    def step(self) -> list[TokenDelta]:
        deltas = self.core.step()
        self.core.scheduler.check()
        for delta in deltas:
            for part, new in ((self.tokens, delta.token_ids), (self.logprobs, delta.logprobs)):
                kept = part.setdefault(delta.request_id, [])  # type: ignore[attr-defined]
                if delta.retract and kept:
                    assert delta.retract <= len(kept)
                    del kept[len(kept) - delta.retract :]
                kept.extend(new)
            self.last[delta.request_id] = delta
        return deltas

    def run(self, *requests: GenerationRequest) -> Watched:
        for item in requests:
            self.core.add(item)
        steps = 0
        while self.core.has_work():
            self.step()
            steps += 1
            assert steps < 5000, "livelock"
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.slots_used, stats.kv_blocks_used) == (0,) * 4
        return self


def ask(
    request_id: int,
    prompt: Sequence[int],
    max_tokens: int = 400,
    *,
    whole: bool = True,
    **more: Any,
) -> GenerationRequest:
    """A request that ends by its length only; `whole` answers may be taken back."""
    grammar = more.pop("grammar", None)
    item = request(request_id, prompt, max_tokens, ignore_eos=True, **more)
    return replace(item, retractable=whole, grammar=grammar)
