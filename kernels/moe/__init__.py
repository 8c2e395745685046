"""Mixture of experts: routing in float32, the chosen experts, and the gated shared expert."""
