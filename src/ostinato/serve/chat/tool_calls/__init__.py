"""Forms in which models write tool calls, readers of them in a growing answer, and their grammars."""
