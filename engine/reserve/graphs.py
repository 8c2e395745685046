"""Which steps are replayed as CUDA graphs, and what that takes. Knows shapes, not torch.

A bucket has a fixed number of rows and a longest sequence. It has as many entries for sequences as
rows, so that every step of at most as many rows fits, however its rows are dealt out.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import GRID, EngineConfig
from engine.reserve.ledger import LedgerTerm, TermKind
from engine.reserve.parameters import element_bytes
from engine.weights.model_config import ModelConfig

GRAPH_STATIC = "graph_static"
GRAPH_POOL = "graph_pool"

INT64_BYTES = 8
FLOAT32_BYTES = 4
# Index arrays of a step by length, in the order of engine.model.batching.StepArrays: token ids,
# positions and owner by row; ends by entry and one; everything else by entry, but for block tables.
ROW_ARRAYS = 4
ENTRY_ARRAYS = 9
# The driver keeps nodes and arguments of every graph: about 2 KiB for each of 1,000 launches.
GRAPH_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """One captured shape: `rows` rows in all, `longest` of one sequence at most."""

    rows: int
    longest: int


def uses_graphs(config: EngineConfig) -> bool:
    """Whether decode and verify steps are replayed; plain torch operators wait for the device."""
    return (
        config.device == "cuda"
        and not config.enforce_eager
        and config.kernels in ("auto", "triton")
    )


def graph_buckets(max_batch_size: int, drafts: int, most_rows: int) -> tuple[Bucket, ...]:
    """Every bucket, the largest first, so that the smaller graphs reuse its memory.

    Args:
        max_batch_size: rows of a step without drafts at most.
        drafts: unverified rows of a sequence at most.
        most_rows: rows of one forward of decodes at most.
    """
    buckets = [Bucket(rows, 1) for rows in _rungs(1, max_batch_size)]
    for longest in range(2, drafts + 2):
        widest = min(max_batch_size * longest, most_rows)
        buckets += [Bucket(rows, longest) for rows in _rungs(longest, widest)]
    return tuple(sorted(buckets, key=lambda b: (-b.rows, -b.longest)))


def _rungs(low: int, high: int) -> list[int]:
    """Powers of two from the first that holds `low` rows on, and `high`."""
    rungs = [1 << power for power in range((low - 1).bit_length(), high.bit_length())]
    return [*(rung for rung in rungs if rung < high), high]


def index_elements(rows: int, table_width: int) -> int:
    """Numbers in all index arrays of a bucket with `rows` rows."""
    arrays = [rows] * (ROW_ARRAYS + ENTRY_ARRAYS) + [rows + 1, rows * table_width]
    # Each begins at a multiple of 16 bytes; see engine.transfer.
    return sum(count + count % 2 for count in arrays)


def static_bytes(model: ModelConfig, config: EngineConfig, most_rows: int) -> int:
    """Bytes of the index arrays, logits and hidden states that all graphs share."""
    width = -(-config.max_seq_len // GRID)
    hidden = most_rows * model.hidden_size * element_bytes(config.dtype)
    logits = most_rows * model.vocab_size * FLOAT32_BYTES
    return index_elements(most_rows, width) * INT64_BYTES + logits + hidden


def graph_terms(
    model: ModelConfig, config: EngineConfig, drafts: int, most_rows: int, row_elements: int
) -> tuple[LedgerTerm, ...]:
    """Static buffers and the graphs' own memory; nothing where steps run eagerly.

    `row_elements` are the numbers of one row that are alive in the widest layer.
    """
    if not uses_graphs(config):
        return ()
    count = len(graph_buckets(config.max_batch_size, drafts, most_rows))
    element = element_bytes(config.dtype)
    # One pool for all: what the largest needs at once, and the head's output before it is widened.
    pool = most_rows * (row_elements * FLOAT32_BYTES + model.vocab_size * element)
    return (
        LedgerTerm(
            GRAPH_STATIC,
            static_bytes(model, config, most_rows),
            TermKind.EXACT,
            f"index arrays, logits and hidden states of {most_rows} rows",
        ),
        LedgerTerm(
            GRAPH_POOL,
            pool + count * GRAPH_BYTES,
            TermKind.ESTIMATE,
            f"{count} CUDA graphs over one memory pool",
        ),
    )
