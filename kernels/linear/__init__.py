"""y = x W^T with a weight that is packed once at load time."""
