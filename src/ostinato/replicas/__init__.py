"""Choice of the engine for a request, among several: pure functions and their state.

Imports neither torch nor a cluster.
"""
