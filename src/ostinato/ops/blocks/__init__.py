"""Weights in blocks: their formats, and what they stand for."""
