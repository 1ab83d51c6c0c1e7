"""Layouts: what requests a number of engines carries, and how long they wait there, estimated before any is built."""
