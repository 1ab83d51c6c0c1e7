"""Conversion of a conversation to a prompt, and of an answer to messages."""
