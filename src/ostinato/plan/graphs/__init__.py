"""Choice of the graphs to capture, and of the graph that serves each batch."""
