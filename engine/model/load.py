"""Weights to a packed network over given pools, one layer in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.model.hybrid import Network
from engine.model.layers import (
    AttentionMixer,
    Layer,
    attention_mixer,
    gdn_mixer,
    layer,
    rotary_tables,
)
from engine.model.mtp import MtpHead
from engine.model.placed import PlacedWeights
from engine.pools.allocate import Pools
from engine.reserve.parameters import CHAIN_BYTES, in_chain_tiles
from engine.weights.layout import (
    AttentionWeights,
    DenseMlpWeights,
    LayerWeights,
    MtpWeights,
    WeightSource,
)
from engine.weights.loader import Checkpoint, Progress
from engine.weights.model_config import ModelConfig
from kernels.draft_chain.types import Chain, ChainWeights
from kernels.ops import Ops


def load_network(
    folder: Path,
    config: ModelConfig,
    pools: Pools,
    ops: Ops,
    max_seq_len: int,
    *,
    with_mtp: bool,
    progress: Progress | None = None,
) -> Network:
    """Read and pack every layer of a folder; the drafter's tensors are checked in any case.

    Raises:
        ModelFormatError: names the tensor that is missing, unknown or misshapen.
    """
    with Checkpoint(folder, config, progress) as checkpoint:
        network = build_network(checkpoint, config, pools, ops, max_seq_len, with_mtp=with_mtp)
        checkpoint.finish()
    return network


def build_network(
    source: WeightSource,
    config: ModelConfig,
    pools: Pools,
    ops: Ops,
    max_seq_len: int,
    *,
    with_mtp: bool,
) -> Network:
    """Pack the layers of a source, whose drafter is asked for even when it stays out."""
    device = pools.states.h.device
    source = PlacedWeights(source, device)
    cos, sin = (table.to(device) for table in rotary_tables(config, max_seq_len))
    gdn_seen = attention_seen = 0

    def build(weights: LayerWeights) -> Layer:
        nonlocal gdn_seen, attention_seen
        if isinstance(weights.mixer, AttentionWeights):
            pages = pools.kv.layer(attention_seen)
            attention_seen += 1
            mixer = attention_mixer(weights.mixer, config, (cos, sin), pages, ops)
            return layer(weights, mixer, config, ops)
        state = pools.gdn_layer(gdn_seen)
        gdn_seen += 1
        return layer(weights, gdn_mixer(weights.mixer, config, state, ops), config, ops)

    embed = source.embed()
    head = source.lm_head()
    lm_head = ops.pack_linear(embed if head is None else head)
    layers = tuple(build(source.layer(i)) for i in range(len(config.layer_kinds)))
    norm: Tensor = source.norm()
    drafter = source.mtp()
    mtp: MtpHead | None = None
    if drafter is not None and with_mtp:
        inner = build(drafter.layer)
        assert isinstance(inner.mixer, AttentionMixer)
        mtp = MtpHead(
            fc=ops.pack_linear(drafter.fc),
            norm_embedding=drafter.norm_embedding,
            norm_hidden=drafter.norm_hidden,
            mixer=inner.mixer,
            layer=inner,
            norm=drafter.norm,
            ops=ops,
            chain=_chain(config, drafter, embed, embed if head is None else head, inner.mixer),
        )
    return Network(embed, layers, norm, lm_head, mtp)


def _chain(
    config: ModelConfig,
    drafter: MtpWeights,
    embed: Tensor,
    head: Tensor,
    mixer: AttentionMixer,
) -> Chain | None:
    """The head for `kernels.draft_chain`, when it is dense, small and kept in bfloat16."""
    inner, mlp = drafter.layer.mixer, drafter.layer.mlp
    make = mixer.ops.draft_chain
    if make is None or not isinstance(mlp, DenseMlpWeights) or not in_chain_tiles(config):
        return None
    assert isinstance(inner, AttentionWeights)
    weights = ChainWeights(
        embed=embed,
        fc=drafter.fc,
        qkv=inner.qkv_proj,
        o=inner.o_proj,
        gate_up=mlp.gate_up,
        down=mlp.down,
        head=head,
        norm_embedding=drafter.norm_embedding,
        norm_hidden=drafter.norm_hidden,
        input_norm=drafter.layer.input_norm,
        post_norm=drafter.layer.post_norm,
        norm=drafter.norm,
        attention=mixer.params,
        pages=mixer.pages,
    )
    stored = {embed.dtype, head.dtype, weights.fc.dtype, weights.qkv.dtype, weights.down.dtype}
    fits = stored == {torch.bfloat16} and weights.matrix_bytes <= CHAIN_BYTES
    return make(weights) if fits else None
