"""What the plan knows of a device: memory, cores, rates, and which native kernels run on it."""
