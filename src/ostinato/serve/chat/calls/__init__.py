"""How models write tool calls: the forms, what reads them from a growing answer, and what writes grammars of them."""
