"""Token ids in, token ids out: scheduler, pools, model and weights. Knows no HTTP and no text."""
