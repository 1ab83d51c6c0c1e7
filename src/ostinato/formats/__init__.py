"""The formats that checkpoints lie in."""
