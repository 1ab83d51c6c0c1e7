"""What can be seen of an engine from outside: counts, latencies, metrics, logs, traces. Imports no other room."""
