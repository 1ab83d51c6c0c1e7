"""Weights in blocks: their formats, what they stand for, and what makes them of others."""
