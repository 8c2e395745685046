"""Finds output that goes round in circles and steers it back. Knows no text and no tensors."""
