"""Bytes: what weights, activations, graphs and cache take."""
