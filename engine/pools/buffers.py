"""The tensors that captured steps read from and write to. Knows shapes, not what runs over them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import GRID, EngineConfig
from engine.reserve.graphs import index_elements
from engine.weights.model_config import ModelConfig


class StepBuffers:
    """Shared by all graphs, since they run one after the other.

    Attributes:
        rows: of a step at most.
        indices: [n] int64, the index arrays one behind the other; block tables last.
        logits: [rows, V] float32.
        hidden: [rows, H] in the activations' dtype.
        table_width: blocks in every block table.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.table_width = -(-config.max_seq_len // GRID)
        length = index_elements(rows, self.table_width)
        self.indices = torch.zeros(length, dtype=torch.int64, device=device)
        self.logits = torch.zeros((rows, model.vocab_size), dtype=torch.float32, device=device)
        self.hidden = torch.zeros((rows, model.hidden_size), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        tensors: tuple[Tensor, ...] = (self.indices, self.logits, self.hidden)
        return sum(t.numel() * t.element_size() for t in tensors)
