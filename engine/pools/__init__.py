"""The tensors that sequences live in: recurrent state by slot, KV by page. Knows no requests."""
