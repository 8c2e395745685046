"""Checkpoints: config.json to a typed config, safetensors to typed weights. Knows no device."""
