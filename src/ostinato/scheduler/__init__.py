"""Requests and the scheduler, which chooses the tokens of each step. Imports no torch."""
