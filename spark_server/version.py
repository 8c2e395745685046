"""The version of this installation; knows nothing else."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed distribution's version, or `0+unknown` when run without an installation."""
    try:
        return metadata.version("spark-server")
    except metadata.PackageNotFoundError:
        return "0+unknown"
