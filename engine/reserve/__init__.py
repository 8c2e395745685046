"""What a model will take, by term, before a weight byte is read. Knows no tensor."""
