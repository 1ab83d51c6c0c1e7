"""Layers of the models. A layer owns weights; kernels, memory and the step's inputs are passed to it."""
