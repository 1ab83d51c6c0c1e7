"""Bytes of weights, activations, graphs and cache."""
