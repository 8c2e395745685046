"""The load generator behind `spark bench`: closed-loop load on any OpenAI-compatible server.

Knows the server only by its HTTP answers and by the processor time of its processes.
"""

from benchmarks.load.cli import main

__all__ = ["main"]
