"""Ostinato beside its peers: each engine in its own environment, in turns, on the same random checkpoints."""
