"""Weights in blocks: their formats, their values, and the functions that quantise others into blocks."""
