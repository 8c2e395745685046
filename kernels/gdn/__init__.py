"""The Gated DeltaNet mixer: causal conv, gates, delta-rule recurrence and gated norm."""
