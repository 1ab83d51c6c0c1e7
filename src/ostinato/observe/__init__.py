"""Counts, latencies, metrics, logs and traces: an engine seen from outside. Imports no other package of the project."""
