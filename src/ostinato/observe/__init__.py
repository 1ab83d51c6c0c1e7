"""What can be seen of an engine from outside: latencies, metrics, logs, traces."""
