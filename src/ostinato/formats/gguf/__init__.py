"""GGUF files: a header of metadata and tensors' places, and behind it tensors in blocks of few bits."""
