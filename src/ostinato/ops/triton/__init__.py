"""Triton kernels: the file named after an operation has a function of that name, called like the reference."""
