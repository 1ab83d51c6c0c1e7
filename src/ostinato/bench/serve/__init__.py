"""A server under load: a generator of requests for any that speaks OpenAI's protocol, and its figures."""
