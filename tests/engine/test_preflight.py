"""Preflight: terms from shapes, KV from what is left, refusals that name a way out."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, DoesNotFitError, InvariantError
from engine.reserve.ledger import LedgerTerm, TermKind
from engine.reserve.memory import DeviceMemory, MemoryKind
from engine.reserve.preflight import Preflight, preflight_reserve
from engine.reserve.sizes import parse_size
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.reserve.terms import allocated_terms
from engine.weights.model_config import ModelConfig, parse_config

GIB = 2**30
WEIGHTS = 100 * 2**20


def small_model() -> ModelConfig:
    return parse_config(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
        }
    )


MODEL = small_model()
CONFIG = EngineConfig("model", max_batch_size=8, max_seq_len=1000, max_prefill_tokens=256)


def host(total: int, others: int = 0) -> DeviceMemory:
    return DeviceMemory(MemoryKind.HOST, total, total - others)


def plan(config: EngineConfig = CONFIG, budget: int = 2 * GIB, **rest: Any) -> Preflight:
    return preflight_reserve(MODEL, config, budget=budget, weights_bytes=WEIGHTS, **rest)


def test_exact_terms_are_the_pools_to_the_byte() -> None:
    ledger = plan(policy=SpeculationPolicy(3)).ledger
    # 3 GDN layers; h 4 x 64 x 64, conv 512 channels x 4 taps, float32.
    blob = 3 * (4 * 64 * 64 + 512 * 4) * 4
    row = (512 + 2 * 4) * 4
    # 1 attention layer and the drafter's; k and v of 2 heads x 64 x 64 tokens, float32.
    block = 2 * 2 * 2 * 64 * 64 * 4
    assert {t.name: t.bytes for t in ledger.terms if t.kind is TermKind.EXACT} == {
        "state_pool": 8 * blob,
        "state_dummy": blob,
        "carry_ring": 8 * 3 * 3 * row,
        "carry_ring_dummy": 3 * 3 * row,
        "rotary_tables": 2 * 1000 * 8 * 4,
        "drafter_log": 9 * 64 * 256 * 4,
        "kv_pool": 8 * 16 * block,
        "kv_dummy": block,
    }
    assert ledger.bytes_of("weights") == WEIGHTS


def test_what_the_pools_hold_is_split_as_the_ledger_splits_it() -> None:
    found = plan(policy=SpeculationPolicy(3))
    terms = {term.name: term.bytes for term in found.ledger.terms}
    allocated = allocated_terms(
        CONFIG,
        state_bytes=terms["state_pool"] + terms["state_dummy"],
        ring_bytes=terms["carry_ring"] + terms["carry_ring_dummy"],
        ring_slots=9,
        kv_bytes=terms["kv_pool"] + terms["kv_dummy"],
        kv_blocks=found.kv_blocks,
        rotary_bytes=terms["rotary_tables"],
    )
    allocated["drafter_log"] = terms["drafter_log"]
    found.ledger.check_allocated(allocated)
    with pytest.raises(InvariantError, match="rotary_tables"):
        found.ledger.check_allocated(allocated | {"rotary_tables": 1})


def test_without_speculation_the_ring_takes_nothing() -> None:
    ledger = plan().ledger
    assert ledger.bytes_of("carry_ring") == ledger.bytes_of("carry_ring_dummy") == 0


def test_kv_on_a_cpu_stops_at_what_can_be_used() -> None:
    found = plan()
    assert found.kv_blocks == 8 * 16
    assert found.kv_tokens == 8 * 16 * GRID
    assert found.free == 2 * GIB - found.ledger.total > 0


def test_kv_takes_what_is_left_when_that_is_less() -> None:
    roomy = plan()
    block = roomy.ledger.bytes_of("kv_dummy")
    tight = plan(budget=roomy.ledger.total - 20 * block - 1)
    assert tight.kv_blocks == roomy.kv_blocks - 21
    assert 0 <= tight.free < block


def test_kv_on_a_gpu_takes_all_that_is_left() -> None:
    found = plan(replace(CONFIG, device="cuda", dtype="bfloat16"), budget=8 * GIB)
    assert found.kv_blocks > 8 * 16
    assert 0 <= found.free < found.ledger.bytes_of("kv_dummy")


def test_kv_tokens_is_rounded_up_to_blocks() -> None:
    assert plan(replace(CONFIG, kv_tokens=1025)).kv_blocks == 17


def test_kv_tokens_below_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-tokens 900 .* --max-seq-len 1000"):
        plan(replace(CONFIG, kv_tokens=900))


def test_half_width_activations_halve_the_pages() -> None:
    full, half = plan(), plan(replace(CONFIG, dtype="bfloat16", kernels="naive"))
    assert half.kv_blocks == full.kv_blocks
    assert 2 * half.ledger.bytes_of("kv_pool") == full.ledger.bytes_of("kv_pool")


def test_scratch_is_only_for_the_chunk_form() -> None:
    assert plan().ledger.bytes_of("gdn_scratch") == 0
    assert plan(replace(CONFIG, kernels="naive")).ledger.bytes_of("gdn_scratch") > 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_snapshots_that_do_not_fit_are_named_with_a_number_that_does(drafts: int) -> None:
    config, policy = replace(CONFIG, snapshot_slots=65536), SpeculationPolicy(drafts)
    with pytest.raises(DoesNotFitError, match="the largest term is snapshots") as caught:
        plan(config, policy=policy)
    found = re.search(r"--ssm-cache-slots (\d+)", str(caught.value))
    assert found is not None
    most = int(found[1])
    assert plan(replace(config, snapshot_slots=most), policy=policy).free >= 0
    with pytest.raises(DoesNotFitError):
        plan(replace(config, snapshot_slots=most + 1), policy=policy)


def test_further_terms_are_counted() -> None:
    other = LedgerTerm("other", 64 * 2**20, TermKind.EXACT, "16 blobs")
    with_them = preflight_reserve(
        MODEL, CONFIG, budget=2 * GIB, weights_bytes=WEIGHTS, further=lambda config: (other,)
    )
    assert with_them.ledger.total == plan().ledger.total + 64 * 2**20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_plans_stay_in_the_budget_and_grow_with_batch_length_and_drafts(
    device: str, share: float
) -> None:
    budget = int(64 * GIB * share)
    before: dict[tuple[int, int, int], Preflight] = {}
    batches, lengths, drafts = (1, 32, 256, 1024), (64, 1000, 4096), (0, 1, 3, 5)
    for batch, length, count in itertools.product(batches, lengths, drafts):
        config = replace(CONFIG, device=device, max_batch_size=batch, max_seq_len=length)
        found = plan(config, budget, policy=SpeculationPolicy(count))
        assert found.ledger.total + found.free == budget
        assert found.free >= 0
        before[batch, length, count] = found
    for key, found in before.items():
        for smaller, plan_of_smaller in before.items():
            if all(a <= b for a, b in zip(smaller, key, strict=True)):
                for term in plan_of_smaller.ledger.terms:
                    if term.name != "kv_pool":
                        assert term.bytes <= found.ledger.bytes_of(term.name), (smaller, key)


def refusal(config: EngineConfig, budget: int, **rest: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan(config, budget, **rest)
    return str(caught.value)


def test_a_refusal_names_the_largest_term_and_both_numbers() -> None:
    config = replace(CONFIG, max_batch_size=4096)
    text = refusal(config, GIB)
    assert "largest term is state_pool" in text
    assert f"budget is {GIB} bytes" in text
    needed = int(re.findall(r"needs (\d+) bytes", text)[0])
    assert plan(config, needed).free == 0
    refusal(config, needed - 1)


def test_every_way_out_of_a_refusal_fits_and_the_next_step_does_not() -> None:
    config = replace(CONFIG, max_batch_size=512, max_seq_len=700_000)
    budget = 1620 * 2**20
    text = refusal(config, budget, memory=host(8 * GIB))
    batch = int(re.findall(r"--max-batch-size (\d+)", text)[0])
    plan(replace(config, max_batch_size=batch), budget)
    refusal(replace(config, max_batch_size=batch + 1), budget)
    length = int(re.findall(r"--max-seq-len (\d+)", text)[0])
    plan(replace(config, max_seq_len=length), budget)
    refusal(replace(config, max_seq_len=length + GRID), budget)
    size = re.findall(r"--memory-budget (\S+?);", text)[0]
    plan(config, parse_size(size))
    share = float(re.findall(r"--gpu-memory-utilization ([\d.]+)", text)[0])
    plan(config, int(8 * GIB * share))
    refusal(config, int(8 * GIB * (share - 0.01)))


def test_a_kv_pool_that_is_too_large_is_answered_with_one_that_fits() -> None:
    config = replace(CONFIG, kv_tokens=10_000_000)
    text = refusal(config, GIB)
    assert "largest term is kv_pool" in text
    tokens = int(re.findall(r"what would fit: .*--kv-tokens (\d+)", text)[0])
    plan(replace(config, kv_tokens=tokens), GIB)
    refusal(replace(config, kv_tokens=tokens + 1), GIB)


def test_when_no_smaller_setting_helps_only_more_memory_is_named() -> None:
    text = refusal(CONFIG, 200 * 2**20, memory=host(300 * 2**20))
    assert "--max-batch-size" not in text
    assert "--max-seq-len" not in text
    assert "a device with more memory than 300.0 MiB" in text


def test_when_others_hold_what_is_needed_their_share_is_named() -> None:
    text = refusal(CONFIG, 200 * 2**20, memory=host(4 * GIB, others=4 * GIB - 300 * 2**20))
    assert "--memory-budget" not in text
    assert "ending what else holds 3.71 GiB of the memory" in text


def test_as_dict_is_json_with_budget_and_blocks() -> None:
    found = plan()
    parsed = json.loads(json.dumps(found.as_dict()))
    assert parsed["kv_blocks"] == 128
    assert parsed["kv_tokens"] == 8192
    assert parsed["budget_bytes"] == parsed["total_bytes"] + parsed["free_bytes"] == 2 * GIB


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_the_advice_counts_what_a_smaller_batch_saves_in_verify_pools(
    mode: SsmRollbackMode,
) -> None:
    """Verify pools, rings and logs shrink with the batch: the advised one is the largest."""
    config = replace(CONFIG, max_batch_size=512, kv_tokens=1024)
    policy = SpeculationPolicy(3, mode, full_width=True)
    most, least = (
        plan(replace(config, max_batch_size=n), 64 * GIB, policy=policy).ledger.total
        for n in (512, 1)
    )
    budget = (most + least) // 2
    text = refusal(config, budget, policy=policy)
    batch = int(re.findall(r"--max-batch-size (\d+)", text)[0])
    plan(replace(config, max_batch_size=batch), budget, policy=policy)
    refusal(replace(config, max_batch_size=batch + 1), budget, policy=policy)
