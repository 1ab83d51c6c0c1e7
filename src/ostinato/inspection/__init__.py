"""Checkpoint inspection for `ostinato inspect`: contents of a checkpoint, and how it would run here, if it does."""
