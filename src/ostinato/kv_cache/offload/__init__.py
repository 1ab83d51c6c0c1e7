"""The cache on disk: evicted entries in files, which a later engine of the same model finds too."""
