"""Which graphs there are, and which serves each batch."""
