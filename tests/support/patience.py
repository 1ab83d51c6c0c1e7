"""How long tests wait for what must happen."""

PATIENCE = 600
"""Seconds after which a test that waits is given up, on however busy a machine."""
