"""Limits that fit, and what they cost."""
