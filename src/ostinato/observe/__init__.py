"""Counts, latencies, metrics, logs and traces: the outside view of an engine.

Imports no other package of the project.
"""
