"""The engine in a separate process: AsyncEngine, the child process, and their messages."""
