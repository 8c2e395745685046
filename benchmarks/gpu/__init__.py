"""What `scripts/gpu_check` does: kernels, engine and numerics proven and timed on one card.

Imports only torch, triton, numpy, safetensors and psutil beside the engine's core.
"""
