"""RMSNorm over the residual stream, fused with the addition before it."""
