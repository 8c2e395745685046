"""What prompts share: KV blocks in a tree over tokens, and checkpoints of the recurrent state."""

from engine.prefix_cache.cache import Match, PrefixCache
from engine.prefix_cache.tree import Key, Node

__all__ = ["Key", "Match", "Node", "PrefixCache"]
