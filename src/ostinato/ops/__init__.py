"""The operations. `facts.py` has a row for each. The file of its name holds its reference, which is the definition.
`kernels.py` makes the kernels that the plan chose."""
