"""silu(gate) * up, the activation of a gated MLP."""
