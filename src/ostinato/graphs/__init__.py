"""Capture and replay of steps: persistent buffers, recorder, arena, and the backends."""
