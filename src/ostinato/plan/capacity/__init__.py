"""Layouts: estimates of the load that a number of engines carries, and of latencies, before any is built."""
