"""Operations of the models.

`operations.py` has a row for each operation, which names the file of its reference in `reference/`: the definition.
`dispatch.py` makes the kernels that the plan chose.
"""
