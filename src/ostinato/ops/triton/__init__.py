"""Triton kernels: in a file of each operation's name a function of that name, which takes what its reference takes."""
