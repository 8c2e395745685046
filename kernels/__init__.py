"""One folder per operator: `naive.py` is the truth in torch, the others are faster forms of it.

Knows tensors and shapes, nothing of requests, slots' owners or policy.
"""
