"""Gated full attention over paged KV: q/k norm, partial RoPE, KV write, attention, output gate."""
