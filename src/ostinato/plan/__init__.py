"""Pure functions from config, model and device to one Plan: what the engine will do, and why. Imports no torch."""
