"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Row p takes token p + 1 and the target's hidden state of position p, after the final norm
(transformers' MtpModel, vLLM's qwen3_next_mtp); re-fed rows take the head's own output instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.model.layers import AttentionMixer, Layer
from kernels.batch import RaggedBatch
from kernels.draft_chain.types import Chain
from kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class MtpHead:
    """fc [2 H -> H] over (embedding, hidden), a decoder layer with its own KV pages, and a norm.

    The layer is held in parts, since a row that proposes nothing needs its keys and values only.
    `chain` is the same head once more, where it is small enough to run several rows deep in a call.
    """

    fc: Linear
    norm_embedding: Tensor
    norm_hidden: Tensor
    mixer: AttentionMixer
    layer: Layer
    norm: Tensor
    ops: Ops
    chain: Chain | None

    def __call__(
        self, embedding: Tensor, hidden: Tensor, batch: RaggedBatch, wanted: Tensor
    ) -> Tensor:
        """embedding [R, H] of the next tokens, hidden [R, H] -> [n, H] after the head's norm.

        All rows leave keys and values; `wanted` [n] int64 says which give a result. It goes to the
        target's lm_head, and is the hidden input of the re-fed row.
        """
        eps, layer = self.layer.eps, self.layer
        normed = self.ops.add_rms_norm
        residual = self._joined(embedding, hidden)
        mixed = self.mixer(normed(residual, None, layer.input_norm, eps), batch, wanted)
        residual = residual[wanted]
        delta = layer.mlp(normed(residual, mixed, layer.post_norm, eps))
        return normed(residual, delta, self.norm, eps)

    def write(self, embedding: Tensor, hidden: Tensor, batch: RaggedBatch) -> None:
        """Leave keys and values of the rows, and nothing else."""
        x = self._joined(embedding, hidden)
        self.mixer.write(
            self.ops.add_rms_norm(x, None, self.layer.input_norm, self.layer.eps), batch
        )

    def _joined(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        joined = self.ops.join_norms(
            embedding, self.norm_embedding, hidden, self.norm_hidden, self.layer.eps
        )
        return self.fc(joined)
