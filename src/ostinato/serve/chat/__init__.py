"""From a conversation to a prompt, and from an answer to messages."""
