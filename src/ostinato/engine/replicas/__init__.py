"""Several engines behind one AsyncEngine: routing of requests, messages, and recovery from a lost engine."""
