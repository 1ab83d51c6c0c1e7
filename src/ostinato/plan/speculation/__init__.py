"""The speculative method and k."""
