"""Connections, bodies, errors and the lifecycle of the server."""
