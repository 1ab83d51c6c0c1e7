"""Images and videos: from what a request brings to patches for the encoder and places in the prompt. No torch."""
