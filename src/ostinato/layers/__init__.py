"""What models are built from. A layer owns weights; kernels, memory and the step's inputs are passed to it."""
