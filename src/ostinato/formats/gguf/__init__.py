"""GGUF files: a header of metadata and tensor places, and after it tensors in blocks of few bits."""
