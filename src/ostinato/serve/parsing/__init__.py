"""The text of chat answers: reasoning split off, tool calls parsed and forced. Pure text, no HTTP, no engine."""
