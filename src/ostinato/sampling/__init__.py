"""Sampling: parameters, logits processing, counter-based noise, log-probabilities."""
