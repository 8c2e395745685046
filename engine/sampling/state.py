"""What sampling must know of one sequence, as a function of its tokens. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

# Below this a draw cannot be told from argmax: tokens 0.01 apart in logits have odds e^-10. Such
# requests are sampled greedily, so that 1e-4 and 1e-6 neither overflow nor differ from greedy text.
GREEDY_BELOW = 1e-3


class SamplingState:
    """The sampling parameters of one sequence beside its tokens.

    Token counts are caught up with `generated` when they are read, never pushed, so they are right
    however many tokens a step emitted and whatever was preempted in between.

    Args:
        params: the request's parameters.
        prompt: the prompt's token ids.
        generated: the list that the sequence appends its tokens to.
        stop_ids: ids that end the sequence; masked while fewer than min_tokens are generated.

    Attributes:
        greedy: the most likely token is taken, without a draw.
        filtered: top_k, top_p or min_p may drop tokens from a draw.
        penalised: the logits depend on the tokens so far.
        changes_logits: bias, penalties or a ban change the logits.
        banned: ids that are not drawn before position `banned_until`, unless nothing else is left.
    """

    __slots__ = (
        "_counted",
        "_counts",
        "_in_prompt",
        "banned",
        "banned_until",
        "changes_logits",
        "filtered",
        "generated",
        "greedy",
        "min_tokens",
        "params",
        "penalised",
        "prompt",
        "stop_ids",
        "wants_logprobs",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt: Listing[int],
        generated: list[int],
        stop_ids: frozenset[int],
    ) -> None:
        self.params = params
        self.prompt = prompt
        self.generated = generated
        self.stop_ids = stop_ids
        self.greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self.penalised = (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
        )
        self.changes_logits = bool(params.logit_bias) or self.penalised
        self.filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.min_tokens = params.min_tokens if stop_ids else 0
        self.wants_logprobs = params.logprobs is not None
        self.banned: tuple[int, ...] = ()
        self.banned_until = 0
        self._counts: npt.NDArray[np.int32] | None = None
        self._in_prompt: npt.NDArray[np.bool_] | None = None
        self._counted = 0

    def ban(self, tokens: Listing[int], until: int) -> None:
        """Draw none of `tokens` before position `until`; in place of an earlier ban."""
        self.banned, self.banned_until = tuple(tokens), until
        self.changes_logits = bool(tokens or self.params.logit_bias) or self.penalised

    def forget(self) -> None:
        """Tokens were taken from the end of `generated`: count anew."""
        self._counts = None
        self._counted = 0

    def counts(self, vocab_size: int, drafts: Listing[int] = ()) -> npt.NDArray[np.int32]:
        """How often each token was generated, int32 [vocab_size], with `drafts` taken as emitted.

        Without drafts this is the state's own array: read it, do not keep or change it.
        """
        if self._counts is None:
            self._counts = np.zeros(vocab_size, np.int32)
        for token in self.generated[self._counted :]:
            self._counts[token] += 1
        self._counted = len(self.generated)
        if not drafts:
            return self._counts
        counts = self._counts.copy()
        for token in drafts:
            counts[token] += 1
        return counts

    def in_prompt(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Which tokens the prompt contains, bool [vocab_size]."""
        if self._in_prompt is None:
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[list(self.prompt)] = True
        return self._in_prompt


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One logits row to draw from.

    Attributes:
        state: the sequence's sampling state.
        position: how many tokens precede the drawn one in the output; the draw's number.
        drafts: unverified tokens between the last emitted token and this row, i.e. the tokens that
            this row's target follows; the target counts only if all of them are accepted.
    """

    state: SamplingState
    position: int
    drafts: tuple[int, ...] = ()
