"""Requests and the scheduler: which tokens of which requests run in a step. Imports no torch."""
