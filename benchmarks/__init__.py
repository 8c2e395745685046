"""Load generator, model trainer and kernel benches; each benchmark ends with one JSON line."""
