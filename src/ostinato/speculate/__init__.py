"""Speculation: what guesses tokens ahead, and whether that pays."""
