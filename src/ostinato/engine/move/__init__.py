"""Requests that move: what one engine exports of a running request, and another of the same plan goes on with."""
