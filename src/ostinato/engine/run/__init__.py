"""A batch becomes tensors, a step runs: the Runner and all that it owns."""
