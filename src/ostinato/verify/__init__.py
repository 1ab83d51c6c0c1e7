"""The third promise as a program: every fast path of a model gives the tokens of the plain one."""
