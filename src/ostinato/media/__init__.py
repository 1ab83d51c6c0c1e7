"""Images and videos: from a request's content to patches for the encoder and places in the prompt. No torch."""
