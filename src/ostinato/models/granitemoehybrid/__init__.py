"""Granite 4 hybrids."""
