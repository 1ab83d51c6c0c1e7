"""Large bodies are read in processes of their own, so that nobody else waits for them."""
