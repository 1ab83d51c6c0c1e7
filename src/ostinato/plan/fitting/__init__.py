"""Limits that fit, and their costs."""
