"""From logits to token ids: penalties, filters, draws and log-probabilities. Knows no slots."""
