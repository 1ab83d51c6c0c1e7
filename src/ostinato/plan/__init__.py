"""What will happen and why: pure functions from config, model and device to one Plan. Imports no torch."""
