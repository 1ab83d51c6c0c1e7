"""The engine in a process of its own: AsyncEngine, the child, and what they say to each other."""
