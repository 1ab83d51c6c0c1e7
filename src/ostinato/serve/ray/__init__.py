"""Replicas on Ray Serve. Modules that import ray are imported only if replicas are asked for."""
