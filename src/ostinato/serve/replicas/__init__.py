"""Replicas on Ray Serve. What imports ray is imported where replicas are asked for."""
