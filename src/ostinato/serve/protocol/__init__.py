"""The bodies of requests, checked: what is not known is refused by name."""
