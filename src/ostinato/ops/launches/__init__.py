"""Launch tables: how each Triton kernel is started, by shape, dtype and device. No torch."""
