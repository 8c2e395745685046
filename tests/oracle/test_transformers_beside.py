"""transformers next to our package `kernels`, whose name a distribution of the hub also has."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_model_class_imports_and_runs_with_our_kernels_on_the_path(tmp_path: Path) -> None:
    code = """
import kernels, torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
config = Qwen3_5TextConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                     "mrope_interleaved": True, "mrope_section": [1, 0, 0]},
)
model = Qwen3_5ForCausalLM(config).eval()
print(kernels.__file__)
print(tuple(model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape))
"""
    lines = run_python(code, tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert Path(lines[0]).parent == ROOT / "kernels"
    assert lines[1] == "(1, 3, 16)"
