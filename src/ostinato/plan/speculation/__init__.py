"""What makes drafts, as planned: the method, its weights and memory, and its graphs."""
