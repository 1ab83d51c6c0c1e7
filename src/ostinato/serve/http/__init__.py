"""Connections, bodies, errors and the life of the server."""
