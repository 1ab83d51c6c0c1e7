"""The step loop: Engine, the Runner that owns tensors, and LLM for use from Python."""
