"""CLI, settings and the OpenAI-compatible HTTP API. Knows text, not tensors."""
