"""Worker processes that read large bodies, so that other requests do not wait for them."""
