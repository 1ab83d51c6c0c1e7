"""A server under load: a load generator for any server with OpenAI's protocol, and its statistics."""
