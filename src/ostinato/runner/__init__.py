"""Execution of batches: the Runner, and the tensors and graphs that it owns."""
