"""Plan of the drafter: the method, its weights and memory, and its graphs."""
