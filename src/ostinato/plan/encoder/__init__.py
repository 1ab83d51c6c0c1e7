"""The vision encoder's part of a plan: budgets, packing, memory."""
