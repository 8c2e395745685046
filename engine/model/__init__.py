"""The model: packed layers and one ragged forward over rows of many sequences. Knows no request."""
