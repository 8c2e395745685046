"""Copies of rows between slots: compaction, checkpoints and snapshots of recurrent state."""
