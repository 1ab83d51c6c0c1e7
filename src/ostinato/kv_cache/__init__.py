"""Bookkeeping of blocks and slots. Imports no torch."""
