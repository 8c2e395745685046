"""The OpenAI-compatible HTTP API: `create_app` puts it together. Knows no tensors."""

from spark_server.api.app import create_app
from spark_server.api.options import ApiOptions

__all__ = ["ApiOptions", "create_app"]
