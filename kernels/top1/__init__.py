"""The most likely token of each row of logits, with its log-probability."""
