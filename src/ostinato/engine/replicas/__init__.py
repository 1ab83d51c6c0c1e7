"""Several engines behind one AsyncEngine: which gets a message, what they say, and what becomes of a lost one's."""
