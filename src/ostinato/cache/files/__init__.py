"""The cache beyond memory: what had to make room, in files that a later engine of the same model finds too."""
