"""Facts about a device: memory, cores, rates, and the native kernels that run on it."""
