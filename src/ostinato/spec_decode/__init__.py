"""Speculative decoding: proposers of draft tokens, and the controller that decides whether drafts pay."""
