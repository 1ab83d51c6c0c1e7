"""What a checkpoint is, and whether and how it would run here: `ostinato inspect`."""
