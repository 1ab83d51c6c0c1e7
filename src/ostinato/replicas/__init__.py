"""Choice of one of several engines for a request: pure functions and their state, without torch and cluster."""
