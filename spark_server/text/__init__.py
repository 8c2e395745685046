"""Text in, text out: tokenizer, chat template, detokenizer, stop strings, reasoning, tool calls.

Knows no HTTP and imports no torch.
"""
