"""Launch tables: the launch of each Triton kernel by shape, dtype and device. No torch."""
