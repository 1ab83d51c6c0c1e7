"""Benchmarks: throughput, latency and start-up of a model on this machine."""
