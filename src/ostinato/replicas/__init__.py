"""Which of several engines gets a request: pure functions and their state. Imports neither torch nor a cluster."""
