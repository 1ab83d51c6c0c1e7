"""Models: one file per architecture, a registry of them, and the weight loader."""
