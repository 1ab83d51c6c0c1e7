"""Triton kernels of the operations that keep states in slots."""
