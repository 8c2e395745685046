"""A loaded hybrid model with its pools: the ModelRunner that the scheduler drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.batching import StepInput, step_input
from engine.model.layers import Layer
from engine.model.mtp import MtpHead
from engine.pools.kv import KvPool
from engine.pools.state import SsmStatePool
from engine.runner import ForwardResult, Segment
from engine.weights.model_config import ModelConfig
from kernels.ops import Linear, Ops

# Below this many rows a second thread costs more than it brings (GEMM of 4.5 M parameters,
# microseconds at 1 / 2 threads: 1 row 887 / 1631, 8 rows 2127 / 2263, 32 rows 5794 / 3301).
ROWS_FOR_THREADS = 16


@dataclass(frozen=True, slots=True)
class Network:
    """Packed weights: embed [V, H] in the checkpoint's dtype, layers, norm [H], head, drafter."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Linear
    mtp: MtpHead | None


class HybridModel:
    """Network and pools behind `engine.runner.ModelRunner`.

    Args:
        config: of the checkpoint.
        network: packed layers that already hold views of the pools.
        states: recurrent state by slot.
        kv: pages of the attention layers.
        ops: the chosen operators.
        dtype: of the activations.
        threads: CPU threads for wide steps; narrow ones use one.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        states: SsmStatePool,
        kv: KvPool,
        ops: Ops,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        self.config = config
        self.network = network
        self.states = states
        self.kv = kv
        self.vocab_size = config.vocab_size
        self.device = states.h.device
        self._ops = ops
        self._dtype = dtype
        self._threads = threads
        self._threads_now = 0

    def claim_slot(self, slot: int) -> None:
        """A new sequence takes `slot`."""
        self.states.claim(slot)

    def move_slot(self, src: int, dst: int) -> None:
        """Copy the sequence in `src` to `dst`."""
        self.states.move(src, dst)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        """Run all rows in one pass; see ModelRunner.forward.

        When it raises, state and KV of the segments' sequences are undefined: end them.
        """
        step = step_input(segments, self.states.pending, self.kv.dummy_block, self.device)
        self._use_threads(step.token_ids.shape[0])
        hidden = self._trunk(step)
        logits = self.network.lm_head(hidden[step.logit_rows])
        # Only now: a forward that raised midway must not fold its pending rows twice.
        for segment in segments:
            self.states.pending[segment.slot] = 0
        return ForwardResult(logits.float(), hidden)

    @torch.inference_mode()
    def draft(self, segments: Sequence[Segment], hidden: Tensor) -> ForwardResult:
        """Run the drafter on rows (next token, hidden [R, H]); positions and pages as in forward.

        Returns its logits for the wanted rows and its hidden states [R, H] after its norm.
        """
        mtp = self.network.mtp
        assert mtp is not None, "the checkpoint has no drafter"
        step = step_input(segments, self.states.pending, self.kv.dummy_block, self.device)
        self._use_threads(step.token_ids.shape[0])
        out = mtp(self._embed(step.token_ids), hidden, step.batch)
        return ForwardResult(self.network.lm_head(out[step.logit_rows]).float(), out)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.network.embed[token_ids].to(self._dtype)

    def _trunk(self, step: StepInput) -> Tensor:
        residual = self._embed(step.token_ids)
        delta: Tensor | None = None
        for layer in self.network.layers:
            delta = layer(residual, delta, step.batch)
        return self._ops.add_rms_norm(residual, delta, self.network.norm, self.config.rms_norm_eps)

    def _use_threads(self, rows: int) -> None:
        threads = self._threads if rows >= ROWS_FOR_THREADS else 1
        if threads != self._threads_now and self.device.type == "cpu":
            torch.set_num_threads(threads)
            self._ops.limit_threads(threads)
            self._threads_now = threads
