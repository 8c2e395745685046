"""Presets, and the Prometheus and Grafana provisioning, read with importlib.resources."""
